"""Fills in the templates: slime's own, or a user's, which has the same variables."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from slime.errors import ConfigError
from slime_launch.job import MOUNTED, PREEMPTED, Job, volumes

#: the template of each kind of cluster
TEMPLATES = {
    "slurm": "slurm.sh",
    "kuberay": "kuberay.yaml",
    "jobset": "jobset.yaml",
    "skypilot": "skypilot.yaml",
    "ray-job": "ray-job.sh",
}
_FOLDER = Path(__file__).with_name("templates")
_SHARED = "has to be in a folder that all nodes share"


def render(job: Job, gres: str | None = None, after: Sequence[str] = ()) -> str:
    """The script or manifest of a job.

    Args:
        job: The job.
        gres: Slurm's name of its GPUs; None if it has none.
        after: The jobs of Slurm that it waits for.

    Raises:
        ConfigError: The template cannot be read or filled in; the message has its file and line.
    """
    import jinja2

    own = job.options.template
    name = TEMPLATES[job.options.on] if own is None else own.name
    places = [_FOLDER] if own is None else [own.parent, _FOLDER]
    loader = jinja2.FileSystemLoader([str(place) for place in places])
    environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    environment.filters.update(sh=_sh, shlex=shlex.join, yaml=_yaml)
    try:
        return environment.get_template(name).render(variables(job, gres, after))
    except (OSError, UnicodeDecodeError, jinja2.TemplateError) as error:
        raise ConfigError(_told(error, own or _FOLDER / name)) from error


def variables(job: Job, gres: str | None, after: Sequence[str] = ()) -> dict[str, Any]:
    """What templates can use."""
    options, kind = job.options, job.options.on
    run_file = str(job.run_file) if job.shares_files else f"{MOUNTED}/run.toml"
    file = TEMPLATES[kind] if options.template is None else options.template.name
    command = job.command(run_file)
    here = str(Path.cwd())
    return {
        **vars(options),
        "job_name": job.name,
        "nodes": job.nodes,
        "gpus_per_node": job.gpus_per_node,
        "gres": gres,
        "after": list(after),
        "train": [*command, "--ray-address", "auto"] if kind == "kuberay" else command,
        "entry": f"cd {shlex.quote(here)} && exec {shlex.join(command)} --ray-address auto",
        "submission": job.submission,
        "train_log": kind == "slurm",
        "run_file": run_file,
        "run_text": job.source.read_text(encoding="utf-8"),
        "source": str(job.source),
        "folder": here if job.shares_files else "/slime",
        "launch": job.launch_there,
        "mounted": MOUNTED,
        "readable": [
            (str(job.launch / file), f"--output-dir {_SHARED}"),
        ]
        if kind == "slurm"
        else [],
        "python": job.tool("python"),
        "ray": job.tool("ray"),
        "ray_version": _ray_version(),
        "signal_s": job.signal_s,
        "saves": job.saves,
        "preempted": PREEMPTED,
        "secrets": [*options.secret, *(["RAY_AUTH_TOKEN"] if kind == "jobset" else [])],
        "volumes": list(volumes(options)),
        "mounts": list(options.mount),
        "gang": None if options.gang is None else options.gang.partition("=")[0],
        "queue": None if options.gang is None else options.gang.partition("=")[2],
    }


def _ray_version() -> str:
    from importlib.metadata import version

    return version("ray")


def _sh(value: object) -> str:
    return shlex.quote(str(value))


def _yaml(value: Any) -> str:
    # JSON is YAML too, and quotes whatever YAML would read as something else.
    return json.dumps(value, ensure_ascii=False)


def _told(error: Exception, path: Path) -> str:
    import jinja2

    if isinstance(error, jinja2.TemplateNotFound):
        return f"--template {path}: there is no template {error.name}"
    line = getattr(error, "lineno", None) or _line_in(error, {path.name})
    where = f"{path}, line {line}" if line else str(path)
    return f"the template {where}: {getattr(error, 'message', None) or error}"


def _line_in(error: BaseException, names: Iterable[str]) -> int | None:
    """The last line of a template that an error came from."""
    found, trace = None, error.__traceback__
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename).name in names:
            found = trace.tb_lineno
        trace = trace.tb_next
    return found
