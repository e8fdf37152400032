"""Parts of whole tensors from pieces in any layout, against slices of the whole."""

import json
from itertools import product
from math import prod

import pytest
import torch
from safetensors.torch import load_file

from dfm_nb.checkpoints import tensor_files
from dfm_nb.checkpoints.tensor_files import CheckpointError, TensorIndex
from tests.json_files import write_json
from tests.refusals import refused

WHOLE = torch.arange(6 * 4, dtype=torch.float32).view(6, 4)


def boxes(dim, count):
    """(offset, shape) of what `count` tensor-parallel ranks have of `WHOLE`."""
    shape = [n // count if d == dim else n for d, n in enumerate(WHOLE.shape)]
    return [([i * n if d == dim else 0 for d, n in enumerate(shape)], shape) for i in range(count)]


def box(offset, shape):
    return WHOLE[tuple(slice(o, o + n) for o, n in zip(offset, shape))]


LAYOUTS = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 4)]


def store(folder, layout, ends, change=lambda index: None):
    """Files of as many ranks as there are pieces: each box is cut at the elements `ends`."""
    pieces = []
    for offset, shape in boxes(*layout):
        cuts = [0, *(e for e in ends if e < prod(shape)), prod(shape)]
        for first, last in zip(cuts, cuts[1:]):
            file = f"rank-{len(pieces):05d}.safetensors"
            tensor_files.write(folder / file, {"w": box(offset, shape).flatten()[first:last]}, {})
            pieces.append({"file": file, "offset": offset, "shape": shape, "elements": [first, last]})
    index = {"w": {"dtype": "F32", "shape": list(WHOLE.shape), "pieces": pieces}}
    change(index["w"])
    write_json(folder / "index.json", index)
    return TensorIndex(folder)


@pytest.mark.parametrize("stored, ends", list(product(LAYOUTS, [(), (1, 5, 7)])))
def test_any_part_is_the_slice_of_the_whole(tmp_path, stored, ends):
    index = store(tmp_path, stored, ends)
    assert torch.equal(index.whole("w"), WHOLE)
    for offset, shape in (b for layout in LAYOUTS for b in boxes(*layout)):
        want = box(offset, shape)
        assert torch.equal(index.part("w", offset, shape), want)
        for first, last in ((0, 1), (2, 5), (0, want.numel())):
            assert torch.equal(index.elements("w", offset, shape, first, last), want.flatten()[first:last])


def test_file_is_one_of_safetensors_and_its_listing_that_of_its_bytes(tmp_path):
    from dfm_nb.base.files import listed_as

    tensors = {
        "a": torch.randn(3, 5).bfloat16(),
        "b": torch.randn(7),
        "c": torch.empty(0, 2),
        "d": torch.randn(4, 4).mT,
    }
    listed = tensor_files.write(tmp_path / "x.safetensors", tensors, {"format": "pt"})
    assert listed == listed_as(tmp_path / "x.safetensors")
    opened, _ = tensor_files.open_safetensors(tmp_path / "x.safetensors")
    opened["b"].zero_()  # what is written to a tensor stays in memory
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys() and all(torch.equal(found[n], t) for n, t in tensors.items())


FAULTS = {
    "lies outside": lambda w: w["pieces"][0].update(offset=[1, 0]),
    "too many elements": lambda w: w["pieces"][0].update(elements=[0, 25]),
    "negative": lambda w: w["pieces"][0].update(offset=[-1, 0]),
    "other rank": lambda w: w["pieces"][0].update(shape=[24]),
    "folder above": lambda w: w["pieces"][0].update(file="../rank-00000.safetensors"),
    "a type": lambda w: w.update(dtype="object"),
    "more": lambda w: w.update(code="import os"),
}


@pytest.mark.parametrize("change", FAULTS.values(), ids=FAULTS)
def test_odd_index_is_refused_when_it_is_opened(tmp_path, change):
    refused(r"index\.json", store, tmp_path, (0, 1), (), change, error=CheckpointError)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"w": null}'])
def test_index_of_other_json_is_refused(tmp_path, text):
    (tmp_path / "index.json").write_text(text)
    refused(r"index\.json", TensorIndex, tmp_path, error=CheckpointError)


LARGE = {"offset": [0], "shape": [1 << 40], "elements": [0, 1 << 40]}
GAPS = {
    "a piece": lambda w: w["pieces"].pop(1),
    "elements": lambda w: w["pieces"][0].update(elements=[0, 2]),
    "its file": lambda w: w["pieces"][0].update(file="rank-00009.safetensors"),
    "its type": lambda w: w.update(dtype="F16"),
    "its size": lambda w: (w.update(shape=[1 << 40]), w.update(pieces=[{**w["pieces"][0], **LARGE}])),
}


@pytest.mark.parametrize("change", GAPS.values(), ids=GAPS)
@pytest.mark.parametrize("whole", [True, False])
def test_tensor_that_is_not_all_there_is_refused(tmp_path, change, whole):
    with pytest.raises(CheckpointError, match=r"index\.json"):
        index = store(tmp_path, (0, 2), (5,), change)
        index.whole("w") if whole else index.part("w", [0, 0], [3, 4])


def test_name_or_shape_of_another_model_is_refused(tmp_path):
    index = store(tmp_path, (0, 1), ())
    for name, shape in (("v", None), ("w", [4, 6])):
        refused(name, index.entry, name, shape, error=CheckpointError)


HEADERS = ["[]", "{", '{"w": 1}', '{"w": {"dtype": "F32", "shape": [2]}}', "[" * 100_000]
HEADERS += [
    json.dumps({"w": {"dtype": dtype, "shape": shape, "data_offsets": at}})
    for dtype, shape, at in [("F64", [1], [0, 8]), ("F32", [-2], [0, -8]), ("F32", [2], [4, 12]), ([], [2], [0, 8])]
]


@pytest.mark.parametrize("header", HEADERS, ids=lambda t: t[:50])
def test_odd_header_is_one_sentence(tmp_path, header):
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(8))
    refused("x.safetensors", tensor_files.open_safetensors, file, error=CheckpointError)
