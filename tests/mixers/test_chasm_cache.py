"""Constants that a mixer keeps in eval: never stale, built once per size."""

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cache_cases import CHASM, SIZE, C, edit_in_place, features, fresh, moved
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode


def edit_one_entry(m: CHASM) -> None:
    with torch.no_grad():
        m.gain_table["cw"][1, 2] = 4.0


def edit_through_data(m: CHASM) -> None:
    m.theta["cw"].data.mul_(1.5)


def replace_data(m: CHASM) -> None:
    m.gain_table["ch"].data = m.gain_table["ch"].data + 1


def swap_averaged_weights(m: CHASM) -> None:
    for p in m.parameters():
        p.data.copy_(p.data * 0.7 + 0.1)


def edit_in_inference_mode(m: CHASM) -> None:
    with torch.inference_mode():
        m.theta["ch"].add_(0.3)


def replace_parameter(m: CHASM) -> None:
    m.theta["ch"] = nn.Parameter(m.theta["ch"].detach() + 0.4)


def initialise(m: CHASM) -> None:
    nn.init.normal_(m.gain_table["ch"])


def load(m: CHASM) -> None:
    m.load_state_dict(moved(CHASM(C, size=SIZE), seed=5).state_dict())


def load_by_assignment(m: CHASM) -> None:
    m.load_state_dict(moved(CHASM(C, size=SIZE), seed=5).state_dict(), assign=True)


def load_partly(m: CHASM) -> None:
    m.theta.load_state_dict(moved(CHASM(C, size=SIZE), seed=5).theta.state_dict())


def from_vector(m: CHASM) -> None:
    params = list(m.parameters())
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(params) + 0.2, params)


def round_trip_through_half(m: CHASM) -> None:
    m.half().float()


def round_trip_through_bfloat16(m: CHASM) -> None:
    m.to(torch.bfloat16).to(torch.float32)


def step_with(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[[CHASM], None]:
    def step(m: CHASM) -> None:
        optimiser = make(m.parameters(), lr=0.2, **options)
        m(features()).square().mean().backward()  # eval mode: gradients must arrive there too
        optimiser.step()

    step.__name__ = f"step of {make.__name__} {options}"
    return step


EDITS = [
    edit_in_place,
    edit_one_entry,
    edit_through_data,
    replace_data,
    swap_averaged_weights,
    edit_in_inference_mode,
    replace_parameter,
    initialise,
    load,
    load_by_assignment,
    load_partly,
    from_vector,
    round_trip_through_half,
    round_trip_through_bfloat16,
    *(step_with(torch.optim.SGD, foreach=f) for f in (True, False)),
    *(step_with(torch.optim.AdamW, foreach=f) for f in (True, False)),
    step_with(torch.optim.SGD, fused=True),
    step_with(torch.optim.AdamW, fused=True),
]


UNSEEN = [edit_through_data, swap_averaged_weights]  # these leave no trace but the values


@pytest.mark.parametrize("edit", EDITS, ids=lambda e: e.__name__)
@pytest.mark.parametrize("inside", ["alone", "in a network"])
def test_no_edit_leaves_a_stale_basis(edit: Callable[[CHASM], None], inside: str) -> None:
    """Writes through .data are seen after .eval(), steps of fused optimisers after the forward they belong to."""
    mixer = moved(CHASM(C, size=SIZE))
    network = nn.Sequential(mixer, nn.Identity()).eval() if inside == "in a network" else mixer.eval()
    x = features()
    with torch.no_grad():
        before = network(x)
        assert torch.equal(network(x), before)
    for _ in range(2):
        edit(mixer)
        if edit in UNSEEN:
            network.eval()
        with torch.no_grad():
            after = network(x)
            assert torch.equal(after, fresh(mixer)(x))
    assert not torch.equal(after, before)


@pytest.mark.parametrize("fused", [True, False])
def test_training_between_two_evaluations(fused: bool) -> None:
    network = nn.Sequential(moved(CHASM(C, size=SIZE)))
    optimiser = torch.optim.AdamW(network.parameters(), lr=0.1, fused=fused)
    seen = []
    for _ in range(3):
        network.eval()
        with torch.no_grad():
            seen.append(network(features()))
            assert torch.equal(seen[-1], fresh(network[0])(features()))
        network.train()
        network(features()).square().mean().backward()
        optimiser.step()
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


@pytest.mark.parametrize(("basis", "gain"), [("identity", "signed"), ("untied", "positive"), ("shared", "complex")])
def test_every_kind_of_parameter_is_watched(basis: Any, gain: Any) -> None:
    mixer = moved(CHASM(C, size=SIZE, basis=basis, gain=gain)).eval()
    x = features()
    with torch.no_grad():
        for name, p in mixer.named_parameters():
            before = mixer(x)
            p.add_(0.5)
            assert torch.equal(mixer(x), fresh(mixer)(x)), name
            assert not torch.equal(mixer(x), before), name


def test_dtype_moves_and_back() -> None:
    mixer = moved(CHASM(C, size=SIZE)).eval()
    x = features()
    with torch.no_grad():
        first = mixer(x)
        mixer.double()
        wide = mixer(x.double())
        assert wide.dtype == torch.float64
        mixer.float()
        assert torch.equal(mixer(x), first)
        mixer.bfloat16()
        assert torch.equal(mixer(x.bfloat16()), fresh(mixer)(x.bfloat16()))


def test_modes_do_not_leak_into_each_other() -> None:
    """Made in inference mode, in no_grad or with gradients: always usable in the other modes."""
    for form in ("fft", "reference"):
        mixer = moved(CHASM(C, size=SIZE, form=form)).eval()
        x = features()
        with torch.inference_mode():
            want = mixer(x).clone()
        with torch.no_grad():
            assert torch.allclose(mixer(x), want, atol=1e-5)
        mixer.requires_grad_(False)
        leaf = x.clone().requires_grad_()
        mixer(leaf).sum().backward()
        assert leaf.grad is not None
        mixer.requires_grad_(True)
        mixer(x).sum().backward()
        assert mixer.theta["ch"].grad is not None
        mixer.train()
        mixer(x).sum().backward()
        with torch.inference_mode():
            assert torch.allclose(mixer.eval()(x), want, atol=1e-5)


def test_gradients_in_eval_are_those_of_training() -> None:
    mixer = moved(CHASM(C, size=SIZE))
    x = features()
    grads = []
    for mode in (mixer.train(), mixer.eval()):
        with torch.no_grad():
            mode(x)  # fills the cache in eval
        mode.zero_grad()
        mode(x).square().sum().backward()
        grads.append([p.grad for p in mode.parameters()])
    for a, b in zip(*grads, strict=True):
        assert a is not None
        assert torch.equal(a, b)


def test_frozen_in_eval_the_gradient_of_x_is_right() -> None:
    mixer = moved(CHASM(C, size=SIZE)).eval()
    x = features()
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    mixer(a).square().sum().backward()
    mixer.requires_grad_(False)
    for _ in range(2):
        b.grad = None
        mixer(b).square().sum().backward()
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(b.grad, a.grad)


def test_a_model_made_in_inference_mode_is_never_stale() -> None:
    with torch.inference_mode():
        mixer = moved(CHASM(C, size=SIZE)).eval()
        x = features()
        before = mixer(x)
        mixer.theta["ch"].add_(0.5)
        after = mixer(x)
        assert not torch.equal(after, before)
        assert torch.equal(after, fresh(mixer)(x))


def test_fake_tensors_keep_out_of_the_cache() -> None:
    mixer = moved(CHASM(C, size=SIZE)).eval()
    with torch.no_grad():
        for _ in range(2):
            with FakeTensorMode(allow_non_fake_inputs=True):
                assert mixer(torch.randn(2, C, *SIZE)).shape == (2, C, *SIZE)
            assert torch.equal(mixer(features()), fresh(mixer)(features()))


def test_copies_do_not_share_constants() -> None:
    mixer = moved(CHASM(C, size=SIZE)).eval()
    x = features()
    with torch.no_grad():
        before = mixer(x)
        for twin in (copy.deepcopy(mixer), pickle.loads(pickle.dumps(mixer))):
            assert torch.equal(twin(x), before)
            twin.theta["ch"].add_(0.5)
            assert torch.equal(twin(x), fresh(twin)(x))
            assert not torch.equal(twin(x), before)
            assert torch.equal(mixer(x), before)


@pytest.mark.parametrize("again", [False, True], ids=["once", "another thread builds meanwhile"])
def test_a_write_during_a_build_in_another_thread_is_seen(monkeypatch: pytest.MonkeyPatch, again: bool) -> None:
    mixer = moved(CHASM(C, size=SIZE)).eval()
    x, build = features(), mixer._operators
    built, go = threading.Event(), threading.Event()

    def slow(spatial: tuple[int, ...]) -> Any:
        made = build(spatial)
        built.set()
        assert go.wait(60)
        return made

    @torch.no_grad()
    def call() -> None:
        mixer(x)

    monkeypatch.setattr(mixer, "_operators", slow)
    thread = threading.Thread(target=call)
    thread.start()
    assert built.wait(60)
    edit_in_place(mixer)
    monkeypatch.setattr(mixer, "_operators", build)
    if again:
        call()
    go.set()
    thread.join()
    with torch.no_grad():
        assert torch.equal(mixer(x), fresh(mixer)(x))


def test_nothing_hooks_into_optimisers() -> None:
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

    CHASM(C, size=SIZE).eval()(features())
    assert not _global_optimizer_post_hooks
    assert not _global_optimizer_pre_hooks


def test_training_builds_all_bases_of_a_mixer_in_one_call_a_step(builds: list[tuple[int, ...]]) -> None:
    mixer = CHASM(C, size=SIZE)
    for _ in range(3):
        mixer(features()).sum().backward()
    assert builds == [(2, 3)] * 3


def test_eval_builds_once_a_size(builds: list[tuple[int, ...]]) -> None:
    mixer = moved(CHASM(C, size=SIZE)).eval()
    with torch.no_grad():
        for _ in range(3):
            mixer(features())
        assert len(builds) == 1
        for _ in range(2):
            for size in ((4, 4), (5, 7)):
                mixer(features(*size))
        assert len(builds) == 3
        mixer(features())
        assert len(builds) == 3
        for n in range(2, 30):
            mixer(features(n, n))
        assert len(mixer._cache.entries) <= 8  # sizes come and go; memory does not grow with them


def test_switching_modes_lets_go_of_the_constants(builds: list[tuple[int, ...]]) -> None:
    network = nn.Sequential(moved(CHASM(C, size=SIZE))).eval()
    with torch.no_grad():
        network(features())
        network.train()
        network.eval()
        network(features())
    assert len(builds) == 2
