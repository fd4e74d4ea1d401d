"""Weights sent to a live SGLang engine by every transport, and failures of that."""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.engines import wait_until_running
from tests.support.families import architecture, read_architecture
from tests.support.model_folders import Folders
from tests.weights.live_engines import (
    TOKENS,
    TRANSPORTS,
    assert_serves,
    engine_log_probs,
    hf_log_probs,
    transport_to,
    weights_of,
)
from tests.weights.megatron_ranks import build, run_ranks
from tests.weights.test_broadcast_group import send
from tests.weights.test_handles import shared_weights
from torch import Tensor

from slime.engine.control import EngineControl
from slime.engine.ports import ReservedPort
from slime.engine.server import EngineServer
from slime.errors import EngineError, WeightSyncError
from slime.kit.processes import living_members
from slime.weights.hf_config import read_hf_config
from slime.weights.hf_load import load_hf
from slime.weights.shards import drain, named_hf_tensors
from slime.weights.transports.group import BroadcastGroup
from slime.weights.transports.tensor import TensorTransport
from slime.weights.verify import WeightCheck

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def engine(request: pytest.FixtureRequest, start_engine: Callable[[int], EngineServer]) -> EngineServer:
    return start_engine(request.param)


@pytest.fixture(scope="module")
def one_rank_engine(start_engine: Callable[[int], EngineServer]) -> EngineServer:
    return start_engine(1)


@pytest.mark.parametrize("bucket_bytes", [2**29, 40_000], ids=["one-bucket", "many-buckets"])
@pytest.mark.parametrize("name", [*TRANSPORTS, "delta"])
def test_engine_computes_with_the_weights_that_were_sent(
    engine: EngineServer, model_folder: Folders, tmp_path: Path, name: str, bucket_bytes: int
) -> None:
    old, new = model_folder("qwen3", seed=1), model_folder("qwen3", seed=2)
    assert (hf_log_probs(old) - hf_log_probs(new)).abs().max() > 0.1
    transport = transport_to(
        engine,
        name,
        old,
        tmp_path,
        update_weight_buffer_size=bucket_bytes,
        check_weight_update_equal=True,
    )
    transport.send(iter(weights_of(old).items()), version="1")
    assert_serves(engine, old, "1")
    metrics = transport.send(iter(weights_of(new).items()), version="2")
    assert_serves(engine, new, "2")
    if name == "delta":  # not whole: norms have not changed
        assert 0.5 < metrics["perf/sync/changed_share"] < 1
    transport.close()


def test_weights_of_a_different_type_are_compared_after_rounding(
    one_rank_engine: EngineServer, model_folder: Folders, tmp_path: Path
) -> None:
    folder = model_folder("qwen3", seed=1)
    transport = transport_to(one_rank_engine, "distributed", folder, tmp_path, check_weight_update_equal=True)
    transport.send(((name, tensor.bfloat16()) for name, tensor in weights_of(folder).items()), version="3")
    transport.close()


def test_tensor_parallel_trainer_sends_its_weights_to_the_engine(
    one_rank_engine: EngineServer, model_folder: Folders, tmp_path: Path
) -> None:
    start, trained = model_folder("qwen3", seed=1), model_folder("qwen3", seed=2)

    def rank(index: int) -> None:
        models = build(start, tp=2, padded_vocab=192)
        model = read_architecture(start)
        load_hf(models, trained, model)
        named = named_hf_tensors(models, model, bucket_bytes=30_000)
        if index != 0:
            drain(named)
            return
        transport = transport_to(one_rank_engine, "distributed", start, tmp_path, check_weight_update_equal=True)
        transport.send(named, version="megatron")
        transport.close()

    run_ranks(rank, 2)
    assert_serves(one_rank_engine, trained, "megatron")


def test_requests_in_flight_wait_for_the_new_weights_and_finish(
    one_rank_engine: EngineServer, model_folder: Folders, tmp_path: Path
) -> None:
    folder = model_folder("qwen3", seed=1)
    transport = transport_to(one_rank_engine, "distributed", folder, tmp_path)
    transport.send(iter(weights_of(folder).items()), version="before")
    answers: list[dict[str, object]] = []

    def generate() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", one_rank_engine.port, timeout=60)
        sampling = {"max_new_tokens": 300, "ignore_eos": True}
        body = json.dumps({"input_ids": TOKENS, "sampling_params": sampling})
        connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        answers.append(json.loads(connection.getresponse().read()))

    thread = threading.Thread(target=generate)
    thread.start()
    wait_until_running(one_rank_engine)
    transport.send(iter(weights_of(folder).items()), version="after")
    thread.join(60)
    transport.close()
    assert len(answers[0]["output_ids"]) == 300
    assert answers[0]["meta_info"]["weight_version"] == "after"


def _one_value_off(tensors: dict[str, Tensor], name: str) -> Iterator[tuple[str, Tensor]]:
    for key, tensor in tensors.items():
        if key == name:
            tensor = tensor.clone()
            tensor.view(-1)[-1] += 1e-3
        yield key, tensor


@pytest.mark.parametrize(
    ("sent_name", "engine_name"),
    [
        ("model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.qkv_proj.weight"),
        ("model.layers.2.mlp.up_proj.weight", "model.layers.2.mlp.gate_up_proj.weight"),
        ("model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.down_proj.weight"),
        ("model.norm.weight", "model.norm.weight"),
    ],
)
def test_check_names_the_one_tensor_that_differs(
    engine: EngineServer, model_folder: Folders, sent_name: str, engine_name: str
) -> None:
    folder = model_folder("qwen3", seed=1)
    weights = weights_of(folder)
    transport = TensorTransport(engines=[engine.control], timeout_s=30, on_gpu=False, bucket_bytes=2**29)
    transport.send(_one_value_off(weights, sent_name), version="off")
    check = WeightCheck(read_architecture(folder), [engine.control.tp_size])
    list(check.observe(iter(weights.items())))
    with pytest.raises(WeightSyncError, match=f"1 differ from the trainer's: {engine_name}\\."):
        check.compare(engine.url, engine.control.weights_checksum())


def test_check_notices_a_tensor_that_never_reached_the_engine(engine: EngineServer, model_folder: Folders) -> None:
    old, new = model_folder("qwen3", seed=1), model_folder("qwen3", seed=2)
    transport = TensorTransport(engines=[engine.control], timeout_s=30, on_gpu=False, bucket_bytes=2**29)
    transport.send(iter(weights_of(old).items()), version="old")
    lost = "model.layers.1.self_attn.q_norm.weight"
    # for an unknown name, the engine answers 200 and keeps the old tensor
    transport.send(
        ((name.replace("q_norm", "qnorm") if name == lost else name, t) for name, t in weights_of(new).items()),
        version="new",
    )
    check = WeightCheck(read_architecture(old), [engine.control.tp_size])
    list(check.observe(iter(weights_of(new).items())))
    with pytest.raises(WeightSyncError, match=f"1 differ from the trainer's: {lost}"):
        check.compare(engine.url, engine.control.weights_checksum())


def test_check_reports_unknown_engine_parameters(engine: EngineServer, model_folder: Folders) -> None:
    deeper = model_folder("qwen3", seed=1)
    shallow = {**read_hf_config(deeper), "num_hidden_layers": 2, "layer_types": None}
    check = WeightCheck(architecture(shallow), [engine.control.tp_size])
    list(check.observe((n, t) for n, t in weights_of(deeper).items() if ".layers.2." not in n))
    with pytest.raises(WeightSyncError, match=r"are in the engine only: model\.layers\.2\.input_layernorm\.weight"):
        check.compare(engine.url, engine.control.weights_checksum())


@pytest.mark.parametrize("name", ["distributed", "tensor"])
def test_a_trainer_that_sends_too_little_gets_an_error(
    one_rank_engine: EngineServer, model_folder: Folders, tmp_path: Path, name: str
) -> None:
    folder = model_folder("qwen3", seed=1)
    transport = transport_to(one_rank_engine, name, folder, tmp_path, check_weight_update_equal=True)
    part = {key: tensor for key, tensor in weights_of(folder).items() if key != "model.norm.weight"}
    with pytest.raises(WeightSyncError, match=r"did not send model\.norm\.weight"):
        transport.send(iter(part.items()), version="part")
    engine_log_probs(one_rank_engine)  # it answers, so it is not paused
    transport.send(iter(weights_of(folder).items()), version="whole")
    assert_serves(one_rank_engine, folder, "whole")
    transport.close()


def test_shared_memory_stays_from_sync_to_sync_and_ends_with_the_transport(
    one_rank_engine: EngineServer, model_folder: Folders, tmp_path: Path
) -> None:
    folder, before = model_folder("qwen3", seed=1), shared_weights(os.getpid())
    transport = transport_to(one_rank_engine, "tensor", folder, tmp_path, update_weight_buffer_size=200_000)
    seen = []
    for version in ("1", "2"):
        transport.send(iter(weights_of(folder).items()), version=version)
        seen.append(shared_weights(os.getpid()) - before)
        assert one_rank_engine.pid is not None
        mapped = set.union(*(shared_weights(pid) for pid in living_members(one_rank_engine.pid)))
        assert seen[-1] <= mapped  # the engine keeps it open
    assert seen[0] == seen[1] and len(seen[0]) == 2
    transport.close()
    assert shared_weights(os.getpid()) == before


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_failed_gathering_leaves_the_engine_serving(
    one_rank_engine: EngineServer, model_folder: Folders, tmp_path: Path, name: str
) -> None:
    folder = model_folder("qwen3", seed=1)

    def failing() -> Iterator[tuple[str, Tensor]]:
        yield from list(weights_of(folder).items())[:10]
        raise RuntimeError("a rank went away")

    transport = transport_to(one_rank_engine, name, folder, tmp_path, update_weight_buffer_size=20_000)
    with pytest.raises(RuntimeError, match="a rank went away"):
        transport.send(failing(), version="never")
    transport.send(iter(weights_of(folder).items()), version="again")
    assert_serves(one_rank_engine, folder, "again")
    transport.close()


def test_a_trainer_killed_in_the_middle_leaves_an_engine_that_a_new_one_can_use(
    one_rank_engine: EngineServer, model_folder: Folders, tmp_path: Path
) -> None:
    folder = model_folder("qwen3", seed=2)
    weights = weights_of(folder)

    def dies_half_way() -> Iterator[tuple[str, Tensor]]:
        yield from list(weights.items())[:20]
        os._exit(9)

    child = os.fork()
    if child == 0:
        doomed = transport_to(one_rank_engine, "distributed", folder, tmp_path, update_weight_buffer_size=20_000)
        doomed.send(dies_half_way(), version="dead")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9

    transport = transport_to(one_rank_engine, "distributed", folder, tmp_path)
    with pytest.raises(WeightSyncError, match=r"beginning the update failed at engine http://127.*already open"):
        transport.send(iter(weights.items()), version="refused")  # which closes the dead trainer's session
    transport.send(iter(weights.items()), version="new")
    assert_serves(one_rank_engine, folder, "new")
    transport.close()


def test_an_engine_waiting_for_broadcasts_continues_when_the_group_ends(
    one_rank_engine: EngineServer, model_folder: Folders
) -> None:
    weights = list(weights_of(model_folder("qwen3", seed=2)).items())
    control = one_rank_engine.control
    group = BroadcastGroup(name="half", world_size=2, backend="gloo", address="127.0.0.1", timeout_s=30)
    joining = threading.Thread(
        target=lambda: control.init_weights_update_group(
            master_address="127.0.0.1",
            master_port=group.port,
            rank_offset=1,
            world_size=2,
            group_name="half",
            backend="gloo",
        )
    )
    joining.start()
    group.join(deadline=time.monotonic() + 30, watch=lambda: None)
    joining.join(30)
    control.begin_weight_update()
    refused: list[str] = []

    def receive() -> None:
        try:
            control.update_weights(
                "distributed",
                names=[name for name, _ in weights],
                dtypes=["float32"] * len(weights),
                shapes=[list(tensor.shape) for _, tensor in weights],
                group_name="half",
                version="half",
            )
        except EngineError as error:
            refused.append(str(error))

    receiving = threading.Thread(target=receive)
    receiving.start()
    for _, tensor in weights[:10]:
        send(group, tensor)
    started = time.monotonic()
    group.close()
    receiving.join(30)
    assert time.monotonic() - started < 25  # the deadline of a sync is 30 s
    assert refused and "Failed to receive weights" in refused[0]
    control.end_weight_update()
    control.destroy_weights_update_group("half")
    engine_log_probs(one_rank_engine)


@pytest.fixture
def dead_engine() -> Iterator[EngineControl]:
    """An address where nothing listens, and nobody else will."""
    port = ReservedPort()
    yield EngineControl(f"http://127.0.0.1:{port.number}")
    port.release()


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_dead_engine_is_named_and_the_other_continues(
    one_rank_engine: EngineServer,
    dead_engine: EngineControl,
    model_folder: Folders,
    tmp_path: Path,
    name: str,
) -> None:
    folder = model_folder("qwen3", seed=1)
    transport = transport_to(one_rank_engine, name, folder, tmp_path, also=[dead_engine])
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match=f"pausing failed at engine {dead_engine.url}"):
        transport.send(iter(weights_of(folder).items()), version="two")
    assert time.monotonic() - started < 25  # the deadline of a sync is 30 s
    transport.close()
    transport = transport_to(one_rank_engine, name, folder, tmp_path)
    transport.send(iter(weights_of(folder).items()), version="one")
    assert_serves(one_rank_engine, folder, "one")
    transport.close()


@pytest.mark.parametrize("name", TRANSPORTS)
def test_engines_wait_for_a_sync_that_is_repeated(
    one_rank_engine: EngineServer, dead_engine: EngineControl, model_folder: Folders, tmp_path: Path, name: str
) -> None:
    folder = model_folder("qwen3", seed=2)
    transport = transport_to(one_rank_engine, name, folder, tmp_path, also=[dead_engine], repeated=True)
    with pytest.raises(WeightSyncError, match=f"pausing failed at engine {dead_engine.url}"):
        transport.send(iter(weights_of(folder).items()), version="first")
    answered = threading.Event()

    def ask() -> None:
        engine_log_probs(one_rank_engine)
        answered.set()

    asking = threading.Thread(target=ask)
    asking.start()
    # It would answer in milliseconds, perhaps from weights of which a part is new.
    assert not answered.wait(1.0)
    transport.connect([one_rank_engine.control])
    transport.send(iter(weights_of(folder).items()), version="again")
    asking.join(30)
    assert answered.is_set()
    assert_serves(one_rank_engine, folder, "again")
    transport.close()


def test_an_engine_left_alone_in_a_group_continues(
    one_rank_engine: EngineServer, model_folder: Folders, tmp_path: Path
) -> None:
    """The second engine of the group can be paused, but then refuses to join."""

    class RefusesToJoin(EngineControl):
        """The same server under another name, instead of a second one; its session is already open."""

        def begin_weight_update(self, *_: object) -> None: ...

        def init_weights_update_group(self, *_: object, **__: object) -> None:
            raise EngineError("no process groups here")

    folder = model_folder("qwen3", seed=1)
    other = RefusesToJoin(one_rank_engine.url.replace("127.0.0.1", "localhost"))
    transport = transport_to(one_rank_engine, "distributed", folder, tmp_path, also=[other])
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match="joining the process group failed at engine http://localhost"):
        transport.send(iter(weights_of(folder).items()), version="alone")
    assert time.monotonic() - started < 25  # the deadline of a sync is 30 s
    transport.close()
    transport = transport_to(one_rank_engine, "distributed", folder, tmp_path)
    transport.send(iter(weights_of(folder).items()), version="one")
    assert_serves(one_rank_engine, folder, "one")
    transport.close()


def test_disk_keeps_the_newest_version_only(
    one_rank_engine: EngineServer, model_folder: Folders, tmp_path: Path
) -> None:
    folder = model_folder("qwen3", seed=1)
    transport = transport_to(one_rank_engine, "disk", folder, tmp_path)
    for version in ("1", "2"):
        transport.send(iter(weights_of(folder).items()), version=version)
    transport.close()
    assert [path.name for path in tmp_path.iterdir()] == ["version-2"]
