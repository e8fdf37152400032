"""A widget to explore a model: prompt and settings, a picture that follows them, a history, and the code of a clip.

While a control moves, a rough picture of 5 evaluations follows it; when it rests, the clip is generated with the
settings shown. One thread samples, so the kernel stays free, and a newer request ends an older one before its next
module. Clips that would take too long are generated only by the button. A clip is the one that the pipeline generates
for the same settings.
"""

import contextlib
import hashlib
import json
import shlex
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ipywidgets as w
import numpy as np

from dfm_nb import display
from dfm_nb.base import geometry, pretrained, video
from dfm_nb.base.files import subfolder, write_atomically
from dfm_nb.base.log import duration, is_headless
from dfm_nb.base.markup import Html, fill
from dfm_nb.diffusion import samplers
from dfm_nb.generation.clip_files import Generated, read_clip
from dfm_nb.generation.request import FLAGS, OF_STUDENTS, Request, read_prompts, requests_of_keywords, usual
from workbench.controls import FLOW, Section, Slider, button, copied, faults_of
from workbench.gallery import Gallery, file_stem, load
from workbench.live import Live, fault_html

PROMPT = "A spotted blue swallowtail over a meadow."
FAST: dict[str, Any] = {"sampler": "unipc_2", "schedule": "flow", "num_steps": 5, "sigma_levels": None}
"""Settings of the rough picture, on average 2 of 255 levels from the finished one (benchmarks/results/studio.md). A
few-step student needs none: its clip is as fast."""
WAIT_S = 60.0
"""A clip that would take longer is generated only by the button."""
SLOW_FLOPS = {"cpu": 1e10, "cuda": 1e12}
"""FLOP/s assumed until a faster clip is measured: of a slow core, and of a GPU with a small network."""
REST_S = 0.6
"""A slider that rests this long has its final value."""
ROUGH_S = 0.5
"""A rough picture that takes no longer than this is finished even if it is outdated."""
HISTORY = 24
"""Number of clips that are kept, with their estimates: some MB each at large sizes."""
WHOLE = {"height": "height px", "width": "width px", "num_video_frames": "frames", "seed": "seed"}
"""Whole numbers, and their labels."""
WEIGHTS = ("checkpoint", "ema")
"""What of a clip's record tells the weights that made it."""
PATH = "path of a picture"
LABELLED: dict[str, Any] = {"layout": {"width": "auto"}, "style": {"description_width": "6em"}}
HIDDEN = {"display": "none"}
STRIP = 8
SIDE_PX = 320
THUMB_PX = 72
STRIP_PX = 56
STEP = '<figure style="margin:0">{}<figcaption>{}</figcaption></figure>'
STRIP_OF = (
    '<div style="font-size:12px;line-height:1.4">'
    "<div>The model's guess at the finished clip (step: noise left). {}</div>{}</div>"
)
THUMB = "<style>.{}{{background:center/cover url({})!important;color:transparent!important}}</style>"
"""Gives the button of a class a picture in the place of its text, which screen readers still read."""
EMPTY = fill('<div style="border:1px solid #8888;width:{}px;max-width:100%;aspect-ratio:1"></div>', SIDE_PX)


class Superseded(Exception):
    """A newer request, or Stop, ended this one."""


class Studio(Live):
    """Prompt, settings, picture and history for one model.

    Parameters
    ----------
    pipe : a loaded pipeline, or an argument of `Pipeline.from_pretrained`: a run folder, an exported file, the name of
        a packaged model. None: the packaged student of `butterflies`.
    prompt, settings : initial values; settings as for `pipe(...)`, by default those that the checkpoint recommends.
    folder : every clip is kept here with its settings, and the next Studio of the same weights shows the newest ones;
        None: in memory alone.

    >>> studio = Studio("runs/demo/train")                          # doctest: +SKIP
    >>> clip = studio.draw("a blue morpho", num_steps=20)           # doctest: +SKIP
    """

    def __init__(
        self, pipe: Any = None, prompt: str = PROMPT, folder: str | Path | None = "runs/studio", **settings: Any
    ):
        if not hasattr(pipe, "run"):
            from dfm_nb.generation.pipeline import Pipeline

            pipe = Pipeline.from_pretrained(pipe or pretrained.STUDENT)
        self.pipe = pipe
        (start,) = requests_of_keywords([prompt], settings)
        start = start.completed(pipe.config)
        start.check()
        self.clip: Generated | None = None
        self.history: list[Generated] = []
        # of each clip (step, sigma after it, the estimate's middle frame uint8 [H, W, 3]), evenly over its steps
        self._ways: dict[Request, list[tuple[int, float, np.ndarray]]] = {}
        self.message = ""
        self._fast: dict[str, Any] = {} if pipe.config.model.student else FAST
        self._flops_per_s = SLOW_FLOPS[pipe.device.type]
        self.faults: dict[str, str] = {}
        self._wake = threading.Condition()
        self._busy = threading.Lock()
        # the thread's next request, and when (monotonic s) it may refine it
        self._job: tuple[Request, float] | None = None
        self._running = self._filling = False
        self._rough: Request | None = None  # the rough request of what is shown
        self._valid = start  # the controls' last request without a fault
        self.folder = None if folder is None else Path(folder).expanduser()
        self._build(start)
        self._fill(start)
        for clip in self._kept_clips():
            self._remember(clip)

    # ---- generating -----------------------------------------------------------------------------------------------

    def draw(self, prompt: str | None = None, **settings: Any) -> Generated:
        """Generate now and return the clip; other settings come from the controls, which are updated.

        Raises
        ------
        ValueError, FileNotFoundError : a wrong setting.
        """
        shown = self.request()
        if shown is None:
            raise ValueError("; ".join(self.faults.values()))
        (changed,) = requests_of_keywords([shown.prompt if prompt is None else prompt], settings)
        values = {**self._own(shown), **changed.chosen}
        if prompt is None:
            values["index"] = shown.index  # of an opened clip that was one of a list
        request = Request(**values).completed(self.pipe.config)
        request.check()
        self.stop()
        self._fill(request)
        return self._finish(request, lambda: True)

    def redraw(self, rest_s: float = 0.0, sure: bool = False) -> None:
        """Request a rough picture of the controls' settings, and the clip after `rest_s` seconds.

        A clip that takes more than `WAIT_S` is not generated unless `sure`: the note shows its time.
        """
        request = self.request()
        if request is None:
            self.stop()
            self._say("nothing is generated until the marked setting is corrected")
            return
        seconds = self.pipe.flops(request) / self._flops_per_s
        if seconds > WAIT_S and not sure:
            self.stop()
            self._say(f"this clip takes about {duration(seconds)} on this machine; press Draw to generate it")
            return
        with self._wake:
            self._job = (request, time.monotonic() + rest_s)
            self._wake.notify_all()
            if not self._running:
                self._running = True
                threading.Thread(target=self._work, name="dfm-studio", daemon=True).start()

    def stop(self) -> None:
        """End the thread's current request, before its next module."""
        with self._wake:
            self._job = None
            self._wake.notify_all()

    def _work(self) -> None:
        while True:
            with self._wake:
                job = self._job
                if job is None:
                    self._running = False
                    return
                self._say("sampling" if self.history else "sampling; the first time also loads the text encoder")
            try:
                self._serve(job)
            except Superseded:
                pass
            except Exception as error:  # nobody would see a thread's traceback
                self._say(f"not drawn: {error}")
            with self._wake:
                if self._job is job:
                    self._job = None

    def _serve(self, job: tuple[Request, float]) -> None:
        def check(patience_s: float = 0.0) -> bool:
            current = self._job is job
            if not current and (self._job is None or time.monotonic() - began > patience_s):
                raise Superseded
            return current

        # A slider moves 2, 3, 4 and rests: rough pictures of 2, 3 and 4, each finished if that takes no longer than
        # ROUGH_S, and REST_S after 4 the clip of 4. A move ends that clip before its next module.
        request, refine_at = job
        began = time.monotonic()
        rough = request.replace(**self._fast)
        if rough != self._rough and request not in self._ways:
            # finished even if the slider moves on, or a fast move would show no picture at all
            frames = self._generate(rough, lambda: check(ROUGH_S), rough=True).frames
            frame = frames[len(frames) // 2]
            media = display.media_html(*video.compressed(frame[None], 1), caption(rough), SIDE_PX)
            self._image.value = framed(media, frame)
            self._rough = rough
            if check(ROUGH_S):
                self._say(f"rough picture of {rough.num_steps} evaluations in {time.monotonic() - began:.2f} s")
        with self._wake:
            self._wake.wait_for(lambda: self._job is not job, refine_at - time.monotonic())
        check()
        self._finish(request, check)

    def _finish(self, request: Request, check: Callable[[], bool]) -> Generated:
        """Generate a request's clip, show it and add it to the history; a clip in the history is reused."""
        began = time.monotonic()
        clip = next((c for c in self.history if c.request == request), None)
        if clip is None:
            clip = self._generate(request, check, rough=False)
            self._remember(clip)
            if self.folder:
                clip.save(_free_name(clip.request, self.folder), latent=True)
            check()
        text = f"done in {time.monotonic() - began:.1f} s: {self._show(clip)}"
        untrained = request.untrained(self.pipe.config)
        self._say(f"{text}; {untrained}" if untrained else text)
        return clip

    def _generate(self, request: Request, check: Callable[[], bool], rough: bool) -> Generated:
        sigmas = request.sigmas(self.pipe.sigma_data)
        estimates: list[tuple[int, float, np.ndarray]] = []

        def on_step(step: int, num_steps: int, clips: Any) -> None:
            check()
            if not rough and step in strip_steps(num_steps):
                estimates.append((step, float(sigmas[step]), clips[0].middle))  # decoded here, which takes time
                self._strip.value = strip_html(estimates, request)
                self._say(f"step {step} of {num_steps}, sigma {sigmas[step]:.3g}")

        with self._looking(check):
            began = time.monotonic()
            ((_, clip),) = self.pipe.run([request], callback=on_step)
            self._flops_per_s = max(self._flops_per_s, self.pipe.flops(request) / (time.monotonic() - began))
        if not rough:
            self._ways[request] = estimates
        return clip

    @contextlib.contextmanager
    def _looking(self, check: Callable[[], object]) -> Iterator[None]:
        """The pipeline for this thread alone, which calls `check` before every module of the network."""
        me = threading.get_ident()

        def look(*_: Any) -> None:
            if threading.get_ident() == me:  # a cell may use the pipeline meanwhile
                check()

        with self._busy, contextlib.ExitStack() as hooks:
            for chunk in self.pipe.chunks:
                for module in chunk.modules():
                    hooks.callback(module.register_forward_pre_hook(look).remove)
            yield

    # ---- the controls ---------------------------------------------------------------------------------------------

    def request(self) -> Request | None:
        """The request of the controls. None if something must be corrected: `faults` are shown at their controls."""
        values = self._fixed | {name: control.value for name, control in self.controls.items()}
        for name in ("init_image", "last_image", "init_video"):
            values[name] = values.get(name) or None
        request = None
        faults: dict[str, str] = {}
        frames = values["num_video_frames"]
        if frames.isdecimal() and not geometry.is_frame_count(int(frames)):  # a request would round it
            values["num_video_frames"] = 1
            faults["num_video_frames"] = f"must be 1 + 4k; got {frames}; use {geometry.nearest_frames(int(frames))}"
        try:
            if "given" in self.controls:
                values["given"] = shlex.split(values["given"])
            request = Request(**values).completed(self.pipe.config)
            request.check()
            request.read_given(min(request.height, request.width))  # a file that is no picture is a fault here
        except (ValueError, FileNotFoundError) as error:
            faults |= faults_of(error, self.controls, "prompt")
        self.faults = faults
        if request and not faults:
            self._valid = request
        for name, fault in self._fault_places.items():
            fault.value = fault_html(faults.get(name, ""))
            fault.layout.display = "" if name in faults else "none"
        return None if faults else request

    def _fill(self, request: Request) -> None:
        """Set the controls without generating."""
        self._fixed = {name: value for name, value in self._own(request).items() if name not in self.controls}
        self._fixed["index"] = request.index  # of a clip that is one of a list: it determines the noise, too
        values = {}
        for name in self.controls:
            value = getattr(request, name)
            if name == "given":
                value = shlex.join(value)
            elif name in WHOLE:
                value = str(value)
            values[name] = "" if value is None else value
        self._filling = True
        for name, value in values.items():
            self.controls[name].value = value
        self._filling = False
        self.request()

    def _follow(self) -> None:
        """Give the controls what is recommended for a new prompt, where they have what was for the last one."""
        values = self._own(self._valid) | {"prompt": self.controls["prompt"].value, "index": self._valid.index}
        with contextlib.suppress(ValueError, FileNotFoundError):  # shown at the control
            self._fill(Request(**values).completed(self.pipe.config))

    def _own(self, request: Request) -> dict[str, Any]:
        """The settings in which a request differs from what the checkpoint recommends for its kind, still or clip."""
        changed = request.changed(usual(self.pipe.config, request.num_video_frames, request.prompt))
        return {name: value for name, value in changed.items() if name in FLAGS}

    def _changed(self, control: Any) -> None:
        if not self._filling:
            if control is self.controls["prompt"] and not self.faults:
                self._follow()
            self.redraw(0.0 if isinstance(control, w.Text) else REST_S)  # text arrives when typing has ended

    def _on_stop(self) -> None:
        self.stop()
        self._say("stopped")

    # ---- history, files and code ----------------------------------------------------------------------------------

    def go_back(self, clip: Generated) -> None:
        """Show a clip of the history, with its settings in the controls."""
        self.stop()
        self._fill(clip.request)
        self._say(f"back at {self._show(clip)}")

    def open(self, file: str | Path) -> None:
        """The settings inside a .png or .mp4 of the Studio or of `dfm generate`, or in its .json, into the controls.

        Raises
        ------
        ValueError, FileNotFoundError : the file is missing or has no settings.
        """
        ((_, settings),) = read_prompts(Path(file).expanduser())
        self._fill(Request(**settings).completed(self.pipe.config))

    def _kept_clips(self) -> list[Generated]:
        """The newest clips of these weights in the folder, oldest first."""
        clips: list[Generated] = []
        weights = [self.pipe.made_by.get(key) for key in WEIGHTS]
        paths = display.media_in(self.folder) if self.folder and self.folder.is_dir() else []
        for path in sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True):
            with contextlib.suppress(Exception):  # a damaged file or another one: safetensors has its own error
                clip = read_clip(path)
                if [clip.made_by.get(key) for key in WEIGHTS] == weights:
                    clips.insert(0, clip)
            if len(clips) == HISTORY:
                break
        return clips

    def code(self) -> tuple[str, str]:
        """The Python call and the `dfm generate` command that reproduce the shown clip."""
        request = self._shown().request
        source = path_of(self.pipe)
        file = "clip.png" if request.num_video_frames == 1 else "clip.mp4"
        settings = [f"{name}={value!r}" for name, value in self._own(request).items()]
        arguments = ", ".join([repr(request.prompt), *settings])
        average = ""
        command = ["dfm", "generate", "--checkpoint-path", source]
        if self.pipe.ema != "auto":
            average = f", ema={self.pipe.ema!r}"
            command += ["--ema", str(self.pipe.ema or "none")]
        words = request.replace(index=0).words(usual(self.pipe.config, request.num_video_frames, request.prompt))
        python = "from dfm_nb import Pipeline\n"
        shell = ""
        call = f"pipe({arguments})[0]"
        if request.index:  # it was one of a list, and its place determines its noise
            python += "from dfm_nb.generation.request import Request\n"
            call = f"next(pipe.run([Request({arguments}, index={request.index})]))[1]"
            line = json.dumps({"prompt": request.prompt, "index": request.index}, ensure_ascii=False)
            shell = f"printf %s {shlex.quote(line)} > clip.jsonl\n"
            command += ["--prompts-file", "clip.jsonl"]
            words = [word for word in words if not word.startswith("--prompt=")]
        python += f"\npipe = Pipeline.from_pretrained({source!r}{average})\nclip = {call}\nclip.save({file!r})"
        return python, shell + shlex.join([*command, *words, "--video-save-path", file])

    def _shown(self) -> Generated:
        if self.clip is None:
            raise ValueError("no clip was generated yet; press Draw, or call draw(prompt)")
        return self.clip

    def _remember(self, clip: Generated) -> None:
        self.history = [*self.history, clip][-HISTORY:]
        self._ways = {c.request: self._ways.get(c.request, []) for c in self.history}
        self._count += 1
        side = f"{THUMB_PX}px"
        back = button(f"back to {self._count}", lambda: self.go_back(clip), tooltip=caption(clip.request))
        back.layout = {"width": side, "height": side, "padding": "0"}
        name = f"dfm-{back.model_id}"
        back.add_class(name)
        url = data_url(clip.frames[0])
        style = w.HTML(fill(THUMB, name, url), layout=HIDDEN)
        column = w.VBox([back, style], layout={"overflow": "visible"})
        self._past.children = (*self._past.children, column)[-HISTORY:]

    # ---- what is seen ---------------------------------------------------------------------------------------------

    def _build(self, start: Request) -> None:
        config = self.pipe.config

        def text(name: str, label: str, placeholder: str = "") -> w.Text:
            tip = Request.model_fields[name].description
            return w.Text(description=label, placeholder=placeholder, continuous_update=False, tooltip=tip, **LABELLED)

        self.controls: dict[str, Any] = {
            "prompt": text("prompt", "prompt", "what the clip shows; Enter generates"),
            "negative_prompt": text("negative_prompt", "negative", "what to move away from"),
            "guidance": Slider(label="guidance", max=max(10.0, start.guidance), step=0.05),
            "num_steps": Slider(label="steps", min=1, max=max(60, start.num_steps), step=1),
            "sampler": w.Dropdown(options=samplers.names(), description="sampler", **LABELLED),
            **{name: text(name, label) for name, label in WHOLE.items()},
            "init_video": text("init_video", "start from", f"{PATH} or clip; Open takes one from your machine"),
            "strength": Slider(label="strength", min=0.05, max=1.0, step=0.05),
        }
        if config.samples.given:
            self.controls["given"] = text("given", "given", f"{PATH} or clip; Open takes one; several with spaces")
            self.controls["given_guidance"] = Slider(label="given guidance", max=5.0, step=0.05)
        if config.dataset.condition_frames_prob:
            self.controls["init_image"] = text("init_image", "first frame", PATH)
        if config.dataset.condition_last_prob:
            self.controls["last_image"] = text("last_image", "last frame", PATH)
        if config.model.student:
            for name in OF_STUDENTS:
                self.controls.pop(name, None)
        rows = []
        self._fault_places = {}
        for name, control in self.controls.items():
            control.observe(lambda _change, control=control: self._changed(control), names="value")
            self._fault_places[name] = w.HTML(layout=HIDDEN)
            rows += [control, self._fault_places[name]]
        draw = button("Draw", lambda: self.redraw(sure=True), icon="play", button_style="primary")
        stop = button("Stop", self._on_stop, icon="stop")
        upload = w.FileUpload(
            description="Open", accept=",".join(display.MEDIA), tooltip="a clip with settings, or a start"
        )
        upload.observe(lambda change: self._on_upload(change["new"]), names="value")
        self._image = w.HTML(EMPTY)
        self._strip = w.HTML()
        self._note = w.HTML()
        self._code = w.HTML()
        self._count = 0  # of clips so far
        self._past = w.HBox(layout=FLOW)
        half = {"flex": "1 1 20em", "min_width": "0", "overflow": "visible"}
        controls = w.VBox([*rows, w.HBox([draw, stop, upload], layout=FLOW)], layout=half)
        pictures = w.VBox([self._image, self._note, self._strip], layout=half)
        top = w.HBox([controls, pictures], layout=FLOW)
        folded = Section(self._code, "Copy as code")
        self.widget = w.VBox([top, self._past, folded, self._code], layout={"overflow": "visible"})
        self.widget.add_class("dfm-studio")
        self._say("press Draw, or move a control")

    def _on_upload(self, files: Any) -> None:
        """A clip that has settings inside restores them; any other is what the next one starts from."""
        for file in files:
            content = bytes(file["content"])
            folder = self.folder or Path(tempfile.mkdtemp(prefix="dfm_nb-"))  # nobody else's
            folder.mkdir(parents=True, exist_ok=True)
            # a folder for each content, so that none of another has the name
            opened = subfolder(folder, "opened", hashlib.sha256(content).hexdigest()[:8])
            path = opened / Path(file["name"]).name
            write_atomically(path, content)
            try:
                self.open(path)
                self._say(f"settings of {path.name}; press Draw")
            except ValueError as error:
                if "given" in self.controls:
                    self.controls["given"].value = shlex.quote(str(path))
                elif "init_video" in self.controls:
                    self.controls["init_video"].value = str(path)
                else:  # a student starts from nothing
                    self._say(str(error))

    def _say(self, text: str) -> None:
        self.message = text
        self._note.value = fill('<span role="status" aria-live="polite">{}</span>', text)

    def _show(self, clip: Generated) -> str:
        """Show a clip with its estimates, settings and code; returns its settings in words."""
        self.clip = clip
        self._rough = clip.request.replace(**self._fast)
        item = load(clip)
        self._image.value = framed(Gallery([item], SIDE_PX).html(), clip.frames[0])
        self._strip.value = strip_html(self._ways[clip.request], clip.request)
        self._code.value = "".join(map(copied, ("Python", "shell"), self.code()))
        self.keep()
        return item.describe()

    def kept_html(self) -> str:
        """The shown clip and its intermediate estimates, as HTML that needs no kernel."""
        if self.clip is None:
            return "no clip was generated yet"
        return Html(self._image.value + self._strip.value)

    def _ipython_display_(self) -> None:
        if self.clip is None and not is_headless():
            self.redraw()
        super()._ipython_display_()

    def __repr__(self) -> str:
        return f"Studio({path_of(self.pipe)!r}, {len(self.history)} clips, {self.message!r})"


def path_of(pipe: Any) -> str:
    """The argument of `Pipeline.from_pretrained` for the same weights."""
    path = (pipe.source.file or pipe.source.folder) if pipe.source else pipe.folder
    return path.stem if pretrained.packaged(path.stem) == path else str(path)


def _free_name(request: Request, folder: Path) -> Path:
    stem = name = f"{file_stem(request.prompt)}-seed{request.seed}"
    n = 1
    while any(folder.glob(f"{name}.*")):
        n += 1
        name = f"{stem}-{n}"
    return folder / name


# ---- pieces of the page as HTML -----------------------------------------------------------------------------------


def strip_steps(num_steps: int) -> Sequence[int]:
    """The steps kept for the strip: evenly spaced, with the first and the last."""
    count = min(STRIP, num_steps)
    return [1 + round(i * (num_steps - 1) / max(1, count - 1)) for i in range(count)]


def strip_html(estimates: Sequence[tuple[int, float, np.ndarray]], request: Request) -> Html:
    """Estimates of the finished clip in a row, each with its step and the remaining sigma."""
    cells = []
    for step, sigma, frame in estimates:
        image = fill(display.IMAGE, data_url(frame), f"after step {step}", f"width:{STRIP_PX}px;display:block")
        cells.append(fill(STEP, image, f"{step}: {sigma:.2g}"))
    return fill(STRIP_OF, caption(request), display.row_html(cells)) if cells else Html()


def caption(request: Request) -> str:
    return f"{request.prompt} (seed {request.seed}, guidance {request.guidance:g}, {request.num_steps} steps)"


def data_url(frame: np.ndarray) -> str:
    return display.data_url(*video.compressed(frame[None], 1))


def framed(media: Html, frame: np.ndarray) -> Html:
    """A box of the picture's final size, so that the page does not jump when a picture is replaced."""
    size = f"max-width:{SIDE_PX}px;aspect-ratio:{frame.shape[1]}/{frame.shape[0]}"
    return fill('<div style="{}">{}</div>', size, media)
