"""The training state on disk: weights, optimizer, schedule and random states, in Megatron's distributed format.

The format is resharded on loading, so a run with another tensor-, pipeline- or data-parallel size can read it. Only
the random states depend on the number of ranks; if it differs, each rank keeps those it started with.

Checkpoints can be written while training continues: from copies, by a thread of the rank. Megatron plans the files and
its writer writes them, as it does when training waits. To do that in the background, it would use a process for each
rank. A forked one inherits the locks of Ray's and gloo's threads as they are in that moment, and sooner or later waits
for one forever. A fresh one needs seconds of imports, the memory of a second interpreter, and every tensor in shared
memory. A thread needs none of these, and hardly slows training down: copying, writing and hashing are done without
Python's lock. It calls nothing collective: what the ranks do together, planning and completing the folders, they do in
their main threads.
"""

from __future__ import annotations

import pickle
import queue
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException

from slime.errors import CheckpointError, CheckpointWriteError, disk_problem, one_line
from slime.train.checkpoint_reader import METADATA, blame, read_metadata, require_complete, without_code
from slime.train.lora import saved_part
from slime.train.parallel import of_all_ranks

_WRITER = filesystem_async.FileSystemWriterAsync

#: how the name of a tensor of one layer begins
_OF_A_LAYER = re.compile(r"decoder\.layers\.\d+\.")

#: writes a state, made of Megatron's sharded tensors, to a folder (collective)
Write: TypeAlias = Callable[[Path, dict[str, Any]], None]


def save_state(folder: Path, chunks: list[Any], optimizer: Any, scheduler: Any, write: Write) -> None:
    """Write the state of all ranks to `folder`, which must be empty or new (collective).

    Args:
        folder: The folder.
        chunks: The bare models of this rank.
        optimizer: Megatron's optimizer over them.
        scheduler: Its learning-rate schedule.
        write: Writes it: `write_now`, or a `BackgroundWrite`.

    Raises:
        CheckpointError: The folder cannot be written.
    """
    state = _model_state(chunks)
    _start_moments(optimizer)
    with _without_gathering(optimizer):
        state["optimizer"] = optimizer.sharded_state_dict(_for_optimizer(state), metadata=_metadata())
    state["scheduler"] = scheduler.state_dict()
    state["random"] = _gather_random_states()
    write(folder, {name: _interned(value) for name, value in state.items()})


def _interned(value: Any) -> Any:
    """Equal state, with one object for equal strings and no container that is there twice.

    A pickle refers back to an object that it has met before, and repeats one that is only equal. Settings that were
    read from a checkpoint are other objects than those of a run's start: common.pt would differ after a resume.
    """
    match value:
        case str():
            return sys.intern(value)
        case dict():
            return {_interned(key): _interned(held) for key, held in value.items()}
        case list() | tuple() if type(value) in (list, tuple):
            return type(value)(map(_interned, value))
    return value


def _start_moments(optimizer: Any) -> None:
    """Give parameters that were never stepped the zeros that the first step would: Megatron cannot save them without.

    A policy that waits for its critic is saved so, for example.
    """
    for part in _parts(optimizer):
        if part.optimizer is None or part.init_state_fn is None:  # a rank without parameters, or moments on the host
            continue
        part.init_state_fn(part.optimizer, part.config)
        for group in part.optimizer.param_groups:
            group.setdefault("step", 0)


def _parts(optimizer: Any) -> list[Any]:
    """The optimizers of which Megatron's consists, such as one more for experts."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


@contextmanager
def _without_gathering(optimizer: Any) -> Iterator[None]:
    """In the body the optimizer's state is gathered only where several ranks share it.

    Megatron gathers it in any case. On a rank that has all of it, that makes five copies, and takes most of the pause
    of a checkpoint that is written in the background.
    """
    alone = [
        part
        for part in _parts(optimizer)
        if isinstance(part, DistributedOptimizer) and part.data_parallel_group.size() == 1
    ]
    for part in alone:
        part.get_parameter_state_dp_zero = partial(_own_state, part)
    try:
        yield
    finally:
        for part in alone:
            del part.get_parameter_state_dp_zero


def _own_state(optimizer: Any, **_: Any) -> dict[int, dict[Any, dict[str, _ByPlace]]]:
    """For each of the optimizer's buffers, its parameters and moments as they are, in the form of the gathered ones."""
    found: dict[int, dict[Any, dict[str, _ByPlace]]] = {}
    for number, ranges_by_type in enumerate(optimizer.gbuf_ranges):
        ((dtype, _buckets),) = ranges_by_type.items()
        by_name: dict[str, _ByPlace] = {name: _ByPlace() for name in ("param", "exp_avg", "exp_avg_sq")}
        for parameter, (start, *_rest) in optimizer.buffers[number].param_index_map.items():
            tensors = optimizer._get_main_param_and_optimizer_states(parameter)
            for name, places in by_name.items():
                places[start] = _float32(tensors[name].detach()).flatten()
        found[number] = {dtype: by_name}
    return found


def _float32(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a float32 copy on the host, since a GPU may have no memory for that."""
    return tensor if tensor.dtype == torch.float32 else tensor.to("cpu", torch.float32)


class _ByPlace(dict[int, torch.Tensor]):
    """Tensors by where they begin in a buffer; the part [start:end] of the buffer is the one that begins at start."""

    def __getitem__(self, place: Any) -> torch.Tensor:
        return super().__getitem__(place.start if isinstance(place, slice) else place)


def save_weights(folder: Path, chunks: list[Any], write: Write) -> None:
    """Write only the weights, otherwise as `save_state` does (collective)."""
    write(folder, _model_state(chunks))


def load_weights(folder: Path, chunks: list[Any]) -> None:
    """Read the weights of a checkpoint, of slime or of Megatron-LM, under any parallel layout (collective).

    Raises:
        CheckpointError: The folder is not such a checkpoint, or does not fit the model.
    """
    with _blaming(folder):
        state = _model_state(chunks, by_layer=_keeps_layers_apart(folder))
        # What is not sharded is left out: Megatron-LM keeps its arguments there.
        _put_into(chunks, _read(folder, state, with_common=False))


def load_state(folder: Path, chunks: list[Any], optimizer: Any, scheduler: Any) -> None:
    """Read what `save_state` wrote, under any parallel layout (collective).

    Args:
        folder: What `save_state` wrote.
        chunks: The bare models of this rank.
        optimizer: Megatron's optimizer over them.
        scheduler: Its learning-rate schedule.

    Raises:
        CheckpointError: As `load_weights` does.
    """
    state = _model_state(chunks)
    state["optimizer"] = optimizer.sharded_state_dict(_for_optimizer(state), is_loading=True, metadata=_metadata())
    with _blaming(folder):
        loaded = _read(folder, state)
        _put_into(chunks, loaded)
        with torch.no_grad(), _own_settings(optimizer):
            optimizer.load_state_dict(loaded["optimizer"])
        scheduler.load_state_dict(loaded["scheduler"])
        states = loaded["random"]
        if len(states) == dist.get_world_size():
            _set_random_state(states[dist.get_rank()])


def write_now(folder: Path, state: dict[str, Any]) -> None:
    """Write a state, and return when it is on disk (collective).

    Raises:
        CheckpointError: The folder cannot be written.
    """
    with attributed(folder):
        plan(folder, state).execute_sync()


def plan(folder: Path, state: dict[str, Any]) -> Any:
    """Decide which rank writes which tensors of `state`, and write what is not sharded (collective).

    Returns:
        Megatron's `AsyncRequest`: how this rank writes its share, and what completes the folder afterwards.
    """
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
    with _write_in_this_process():
        return dist_checkpointing.save(state, str(folder), strategy, async_sharded_save=True)


@contextmanager
def attributed(folder: Path) -> Iterator[None]:
    """In the body `folder` is written: errors of the disk, on any rank, become a `CheckpointError` that names it."""
    try:
        yield
    except (CheckpointException, CheckpointingException, OSError, RuntimeError) as error:
        raise CheckpointWriteError(
            f"the training state could not be written to {folder}: {disk_problem(_cause(error), folder)}"
        ) from error


def _keeps_layers_apart(folder: Path) -> bool:
    """Whether each layer of a checkpoint has its own tensors. Otherwise those of all layers are stacked."""
    require_complete(folder)
    return any(map(_OF_A_LAYER.match, read_metadata(folder / METADATA).state_dict_metadata))


def _read(folder: Path, state: dict[str, Any], *, with_common: bool = True) -> dict[str, Any]:
    require_complete(folder)
    with without_code(folder, with_common=with_common) as common:
        loaded: dict[str, Any] = dist_checkpointing.load(
            state, str(folder), sharded_strategy=TorchDistLoadShardedStrategy(), common_strategy=common
        )
    return loaded


@contextmanager
def _blaming(folder: Path) -> Iterator[None]:
    """Name the folder in whatever goes wrong while its content is read and put into the model.

    A checkpoint may come from somewhere else and contain anything, so any error may be its fault.
    """
    try:
        yield
    except CheckpointError:
        raise
    except (CheckpointException, Exception) as error:
        cause = _cause(error)
        if isinstance(cause, CheckpointError):
            raise cause from error
        if isinstance(cause, pickle.UnpicklingError):
            raise blame(folder, cause) from error
        raise CheckpointError(
            f"{folder} could not be loaded into this model: {one_line(cause)}. Is it a checkpoint of the same"
            " architecture?"
        ) from error


def _put_into(chunks: list[Any], loaded: dict[str, Any]) -> None:
    with torch.no_grad():
        for number, chunk in enumerate(chunks):
            saved_part(chunk).load_state_dict(loaded[_model_key(number, chunks)])


@contextmanager
def _own_settings(optimizer: Any) -> Iterator[None]:
    """Keep this run's options of the optimizer (learning rate, betas, ...); the saved groups hold the other run's."""
    own = [{name: group[name] for name in group.keys() - {"params", "step"}} for group in optimizer.param_groups]
    yield
    for group, settings in zip(optimizer.param_groups, own, strict=True):
        group.update(settings)


def _cause(error: BaseException) -> BaseException:
    """The error itself; of torch's CheckpointException, which holds the errors of the ranks, the first of those."""
    if isinstance(error, CheckpointException) and error.failures:
        cause: BaseException = next(iter(error.failures.values()))[0]
        return cause
    return error


def _metadata() -> dict[str, Any]:
    """The format of the optimizer's shards; Megatron's default is a format that it no longer supports."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _model_key(number: int, chunks: list[Any]) -> str:
    return "model" if len(chunks) == 1 else f"model{number}"


def _model_state(chunks: list[Any], *, by_layer: bool = False) -> dict[str, Any]:
    metadata = _metadata() | {"non_homogeneous_layers": by_layer}
    return {
        _model_key(number, chunks): saved_part(chunk).sharded_state_dict(metadata=metadata)
        for number, chunk in enumerate(chunks)
    }


def _for_optimizer(model_state: dict[str, Any]) -> dict[str, Any]:
    """The model's state as the optimizer expects it: without the key for one chunk, by key for several."""
    return dict(model_state.get("model", model_state))


def _gather_random_states() -> list[dict[str, torch.Tensor]]:
    own = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        own["cuda"] = torch.cuda.get_rng_state()
    return of_all_ranks(own)


def _set_random_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


@contextmanager
def _write_in_this_process() -> Iterator[None]:
    """What is planned in the body is written in this process, by whoever executes it.

    Megatron would start a manager process (seconds of imports, and it outlives a killed rank), fork a process full of
    communication threads, and wait forever for a worker that died.
    """
    stock = _WRITER.write_preloaded_data_multiproc
    stock_queue = filesystem_async._results_queue
    _WRITER.write_preloaded_data_multiproc = staticmethod(_write_buckets)
    filesystem_async._results_queue = queue.Queue()
    try:
        yield
    finally:
        _WRITER.write_preloaded_data_multiproc = staticmethod(stock)
        filesystem_async._results_queue = stock_queue


def _write_buckets(
    transforms: list[Any],
    use_msc: bool,
    _rank: int,
    buckets: list[Any],
    results: queue.Queue[Any],
) -> None:
    """Replaces `write_preloaded_data_multiproc`: the same writer, for the one bucket of one thread."""
    # Without its decorator, which turns the garbage collector off: training may go on in another thread.
    write = _WRITER.write_preloaded_data.__wrapped__
    [bucket] = buckets
    answer: queue.Queue[Any] = queue.Queue()
    pending: queue.Queue[int] = queue.Queue()
    pending.put(0)
    write(transforms, 0, bucket, answer, pending, True, use_msc=use_msc)
    _, written = answer.get_nowait()
    results.put(written if isinstance(written, Exception) else {0: written})


T = TypeVar("T")


class BackgroundWrite(Generic[T]):
    """The folders of one checkpoint that this rank writes in the background.

    Called with each folder and its state, as `write_now` is; then `start`, and `finish`.
    """

    def __init__(self) -> None:
        self._planned: list[tuple[Path, Any]] = []
        self._writing: Future[T]

    def __call__(self, folder: Path, state: dict[str, Any]) -> None:
        """Plan how `state` is written to `folder`, and copy this rank's share to host memory (collective).

        Raises:
            CheckpointError: The folder cannot be written.
        """
        live = {data.untyped_storage().data_ptr() for data in _tensors(state)}
        with attributed(folder):
            request = plan(folder, state)
        if request.async_fn is not None:
            _, buckets, _ = request.async_fn_args
            for _, _, (_, tensors) in buckets:
                # In place: what was gathered for this is freed as it is copied. Megatron has cloned views on the host.
                for number, (item, tensor) in enumerate(tensors):
                    if not tensor.is_cpu or tensor.untyped_storage().data_ptr() in live:
                        tensors[number] = item, tensor.detach().to("cpu", copy=True)
        self._planned.append((folder, request))

    def start(self, then: Callable[[], T]) -> None:
        """Begin to write the copies; `then` is called in the same thread when they are on disk."""
        pool = ThreadPoolExecutor(1, thread_name_prefix="write-checkpoint")
        self._writing = pool.submit(self._write, then)
        pool.shutdown(wait=False)

    def _write(self, then: Callable[[], T]) -> T:
        for _, request in self._planned:
            if request.async_fn is not None:
                request.async_fn(*request.async_fn_args)
        return then()

    @property
    def written(self) -> bool:
        """Whether the thread has ended, also by an error; never blocks."""
        return self._writing.done()

    def finish(self) -> T:
        """Wait for the thread, and complete the folders (collective); what `then` returned.

        Raises:
            CheckpointError: A rank could not write its share.
        """
        answer = self._writing.result()
        for folder, request in self._planned:
            with attributed(folder):
                for complete in request.finalize_fns:
                    complete()
        return answer


def _tensors(state: dict[str, Any]) -> Iterator[Tensor]:
    """What the entries of a state to be saved hold."""
    for entry in nested_values(state):
        if isinstance(data := getattr(entry, "data", None), Tensor):
            yield data
