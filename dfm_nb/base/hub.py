"""Files of the Hugging Face hub: from the cache on this machine, otherwise downloaded."""

from pathlib import Path
from typing import Any


def hub_file(repository: str, name: str, fix: str, **where: Any) -> Path:
    """The local copy of a file.

    Parameters
    ----------
    fix : the end of the message: what to do if the file is not available.
    **where : `cache_dir`, `repo_type` and `revision` of `hf_hub_download`.

    Raises
    ------
    FileNotFoundError : it is not in the cache and cannot be downloaded.
    """
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repository, name, **where))
    except Exception as error:  # offline, no such file, no permission, TLS, ...: many types from several libraries
        cache = f" in {where['cache_dir']}" if where.get("cache_dir") else ""
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise FileNotFoundError(f"{name} of {repository} is not{cache} and cannot be fetched ({why}); {fix}") from None


def tokenizer_of(folder: str | Path, **where: Any) -> Any:
    """transformers' tokenizer of a folder or hub id; without `trust_remote_code` it asks on standard input.

    Raises
    ------
    ValueError : it needs Python code of its own, which is not run.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, **where)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        fix = "use one with a tokenizer.json and without auto_map in tokenizer_config.json"
        raise ValueError(f"a tokenizer must be data alone; {folder} needs Python code; {fix}") from None
