"""What every registered mixer must do. A new one is covered the moment it is registered."""

import copy
import inspect

import pytest
import torch
from registry_cases import NAMES, RIVALS, C, each_mixer, each_rival, make, maps, relative
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from chasm.mixers import (
    AFNO,
    MIXERS,
    Facts,
    GFNet,
    Mixer,
    Residual,
    SpectFormer,
    create_mixer,
    create_slot,
    register_mixer,
)
from chasm.mixers.ffc import FourierUnit
from chasm.mixers.fno_d import SpectralConv

# odd, tiny, of different parity, and on either side of the size and the modes that the mixer was built with
SIZES = [(8, 8), (7, 5), (12, 9), (1, 1), (2, 3), (3, 2), (1, 6), (40, 34)]


def test_all_of_the_comparison_are_registered():
    assert set(RIVALS) | {"identity"} <= set(NAMES)


@each_mixer
def test_any_size_keeps_shape_dtype_and_device(name):
    for m in (make(name), make(name).eval()):
        for size in SIZES:
            x = maps(*size)
            before = x.clone()
            y = m(x)
            assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device), size
            assert y.isfinite().all(), size
            assert torch.equal(x, before), size


class Waits(TorchFunctionMode):
    """Notes calls that would make the host wait for a GPU: numbers sent from Python to a tensor, or read from one."""

    CALLS = (torch.tensor, torch.as_tensor, Tensor.new_tensor, Tensor.item, Tensor.tolist, Tensor.__bool__)

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in self.CALLS:
            self.found.append(function.__name__)
        return function(*args, **(kwargs or {}))


@each_mixer
def test_a_step_never_waits_for_the_host(name):
    """A CUDA graph cannot capture a mixer that does."""
    m, x = make(name), maps(8, 8).requires_grad_()
    m(x)  # constants are made once
    with Waits() as waits:
        m(x)
    # On a CPU reading a norm costs nothing; it decides how often CHASM squares its bases.
    assert [call for call in waits.found if call != "item"] == []


@each_mixer
def test_default_size(name):
    x = maps(6, 6)
    assert create_mixer(name, channels=C)(x).shape == x.shape


@each_mixer
def test_gradients_reach_every_parameter_and_the_input(name):
    for size in ((8, 8), (5, 3)):
        m = make(name)
        x = maps(*size).requires_grad_()
        y = m(x)
        (y * torch.randn_like(y)).sum().backward()
        assert x.grad.isfinite().all()
        assert x.grad.abs().sum() > 0
        for key, p in m.named_parameters():
            assert p.grad is not None, key
            assert p.grad.isfinite().all(), key
            assert p.grad.abs().sum() > 0, key


@each_mixer
def test_one_number_is_a_square_map(name):
    one, two = (create_mixer(name, channels=C, size=size) for size in (6, (6, 6)))
    assert [p.shape for p in one.parameters()] == [p.shape for p in two.parameters()]
    assert one(maps(6, 5)).shape == (2, C, 6, 5)


@each_mixer
def test_derivative_is_right(name):
    m = make(name, dtype=torch.float64).eval()
    x, v = maps(5, 4, dtype=torch.float64), torch.randn(2, C, 5, 4, dtype=torch.float64)
    h = 1e-6
    numeric = ((m(x + h * v) - m(x - h * v)) / (2 * h)).sum()
    x.requires_grad_()
    m(x).sum().backward()
    assert (x.grad * v).sum().item() == pytest.approx(numeric.item(), rel=1e-5, abs=1e-6)


@each_mixer
def test_float64_is_kept_and_agrees_with_float32(name):
    m, x = make(name).eval(), maps(7, 6)
    y = copy.deepcopy(m).double()(x.double())
    assert y.dtype == torch.float64
    assert relative(m(x), y) < 1e-5


@each_mixer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_modules(name, dtype):
    m = make(name).to(dtype)
    x = maps(8, 7, dtype=dtype).requires_grad_()
    y = m(x)
    y.float().square().mean().backward()
    assert y.dtype == dtype
    assert y.isfinite().all()
    assert all(p.grad.isfinite().all() for p in m.parameters())
    reference = copy.deepcopy(m).float().eval()(x.float())
    assert relative(m.eval()(x), reference) < (0.03 if dtype == torch.bfloat16 else 0.005)


@each_mixer
def test_autocast(name):
    m = make(name).eval()
    for dtype in (torch.float32, torch.bfloat16):
        x = maps(8, 7, dtype=dtype)
        with torch.autocast("cpu", torch.bfloat16):
            y = m(x)
        assert y.dtype == dtype
        assert relative(y, m(x.float())) < 0.03


@each_mixer
def test_every_layer_is_called_so_that_hooks_pruning_and_other_layers_in_its_place_have_an_effect(name):
    mixer, called = make(name), set()
    layers = {n: m for n, m in mixer.named_modules() if isinstance(m, nn.Conv2d | nn.Linear | nn.GroupNorm)}
    for n, layer in layers.items():
        layer.register_forward_hook(lambda *_, n=n: called.add(n))
    mixer(maps(6, 7))
    assert called == set(layers)


@pytest.mark.parametrize(
    "part",
    [GFNet(C), SpectFormer(C), AFNO(C), FourierUnit(C), SpectralConv(C, C, (3, 3))],
    ids=lambda part: type(part).__name__,
)
def test_autocast_does_not_reach_the_spectrum(part):
    x = maps(8, 7)
    expected = part.eval()(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(part(x), expected)


@pytest.mark.parametrize(
    ("name", "std"),
    [("gfnet", 0.028), ("spectformer", 0.019), ("afno", 1.00), ("ffc", 0.60), ("fno-d", 0.20),
     ("difffno", 0.55), ("fsel", 1.05)],
)  # fmt: skip
def test_scale_at_initialisation(name, std):
    torch.manual_seed(0)
    m = create_mixer(name, channels=96, size=(128, 128))
    with torch.no_grad():
        assert m(torch.randn(1, 96, 128, 128)).std().item() == pytest.approx(std, rel=0.08)


@each_mixer
def test_memory_formats_agree(name):
    m, x = make(name).eval(), maps(8, 6)
    y = m(x)
    strided = maps(8, 6).repeat_interleave(2, -1)[..., ::2]
    assert not strided.is_contiguous()
    for view in (x.contiguous(memory_format=torch.channels_last), strided, x.mT.contiguous().mT):
        assert relative(m(view), y) < 1e-6


@each_mixer
def test_empty_batch(name):
    m = make(name)
    for mode in (m.train(), m.eval()):
        y = mode(maps(8, 6, batch=0))
        assert y.shape == (0, C, 8, 6)


@each_mixer
def test_same_seed_same_values(name):
    a, b, x = make(name), make(name), maps(8, 8)
    assert torch.equal(a(x), b(x))
    a.eval(), b.eval()
    assert torch.equal(a(x), b(x))
    assert torch.equal(a(x), a(x))


@each_mixer
def test_state_dict_round_trip(name, tmp_path):
    a, b, x = make(name, seed=0).eval(), make(name, seed=1).eval(), maps(8, 8)
    b.load_state_dict(a.state_dict())
    assert torch.equal(a(x), b(x))
    c = make(name, seed=2).eval()
    save_file(a.state_dict(), tmp_path / "mixer.safetensors")
    c.load_state_dict(load_file(tmp_path / "mixer.safetensors"))
    assert torch.equal(a(x), c(x))


@each_mixer
def test_everything_stored_is_real(name):
    m = make(name)
    assert not any(t.is_complex() for t in (*m.parameters(), *m.buffers()))
    for module in m.modules():
        for key in getattr(module, "complex_parameters", ()):
            item = getattr(module, key)
            for p in item.parameters() if isinstance(item, nn.Module) else (item,):
                assert p.shape[-1] == 2, key


@each_mixer
def test_spectral_parameters_exist(name):
    m = make(name)
    for module in m.modules():
        for key in getattr(module, "spectral_parameters", ()):
            item = getattr(module, key)  # an option may leave it out as None, but the name must be known
            assert item is None or isinstance(item, nn.Module | nn.Parameter), key


@each_mixer
def test_device_and_dtype_reach_every_tensor(name):
    m = create_mixer(name, channels=C, size=(8, 8), device="meta", dtype=torch.float64)
    for t in (*m.parameters(), *m.buffers()):
        assert t.device.type == "meta"
        assert t.dtype == torch.float64 or not t.is_floating_point()


@each_mixer
def test_counts_without_memory(name):
    with torch.device("meta"):
        m = create_mixer(name, channels=C, size=(8, 8)).eval()
    x = torch.empty(2, C, 12, 10, device="meta")
    assert m(x).shape == x.shape


@each_mixer
def test_identity_path_is_a_fact_of_the_class(name):
    cls = MIXERS.get(name)
    assert issubclass(cls, Mixer)
    assert cls.owns_residual == ("residual" in MIXERS.options(name))
    x = maps(8, 8)
    if cls.owns_residual:
        assert not isinstance(create_slot(name, C, (8, 8)), Residual)
        assert create_slot(name, C, (8, 8), host_residual=True).residual is False
        whole, bare = make(name).eval(), make(name, residual=False).eval()
        if name != "difffno":  # its identity passes a gate, see test_fno
            assert relative(x + bare(x), whole(x)) < 1e-6
        assert relative(bare(x), whole(x)) > 1e-3
    else:
        assert isinstance(create_slot(name, C, (8, 8)), Residual)
        assert isinstance(create_slot(name, C, (8, 8), host_residual=True), cls)


@each_mixer
def test_signature_is_explicit(name):
    options = MIXERS.options(name)
    assert {"channels", "size", "device", "dtype"} <= set(options)
    assert all(o.kind is not inspect.Parameter.VAR_KEYWORD for o in options.values())
    assert all(o.kind is inspect.Parameter.KEYWORD_ONLY for key, o in options.items() if key != "channels")


@each_mixer
def test_unknown_option_suggests_the_near_one(name):
    with pytest.raises(ValueError, match="has no option 'sise': did you mean 'size'"):
        create_mixer(name, channels=C, sise=(8, 8))


def test_unknown_name_suggests_the_near_one():
    with pytest.raises(ValueError, match="unknown mixer 'gfnett': did you mean 'gfnet'"):
        create_mixer("gfnett", channels=C)


@each_rival
@pytest.mark.parametrize("shape", [(2, C + 1, 8, 8), (C, 8, 8), (1, C, 2, 8, 8), (1, 8, 8, C)])
def test_wrong_shape_is_one_line(name, shape):
    with pytest.raises(ValueError, match=rf"expected a real map \(B, {C}, H, W\), got \({shape[0]}, ") as info:
        make(name)(torch.randn(shape))
    assert "\n" not in str(info.value)


@each_rival
def test_map_without_positions_is_refused(name):
    with pytest.raises(ValueError, match="expected H and W of at least 1"):
        make(name)(torch.empty(2, C, 0, 8))


@each_rival
def test_complex_input_is_refused(name):
    with pytest.raises(ValueError, match="expected a real map"):
        make(name)(torch.randn(1, C, 8, 8, dtype=torch.complex64))


TAXONOMY = {  # of the paper's appendix: response, channel mixing, shared basis, positive gains; Core Params
    "gfnet": ("learned filters", "diagonal/filter-wise", "no", "no", "0.80M"),
    "afno": ("adaptive Fourier modes", "block/channel", "no explicit", "no", "0.01M"),
    "ffc": ("Fourier branch", "conv./spectral", "no explicit", "no", "1.19M"),
    "fno-d": ("learned FNO response", "mode-wise", "no explicit", "no", "4.74M"),
    "difffno": ("dynamic Fourier response", "frequency-conditioned", "no explicit", "no", "4.77M"),
    "fsel": ("frequency selection", "learned enhancement", "no explicit", "no", "0.06M"),
    "spectformer": ("spectral attention", "token/channel", "no explicit", "no", "0.02M"),
}


@each_mixer
def test_facts(name):
    f = MIXERS.get(name).facts
    assert isinstance(f, Facts)
    assert f != Mixer.facts  # those of a file of one's own that gives none
    assert f.response
    assert f.channel_mixing
    assert f.resolution
    if name in RIVALS:
        got = (f.response, f.channel_mixing, f.shared_basis, f.positive_gains, f.paper_params)
        assert got == TAXONOMY[name]
        assert f.note
    if name in ("fno-d", "difffno"):
        assert "reading" in f.note


def test_a_users_own_mixer_needs_only_the_decorator():
    try:

        @register_mixer("mean-of-user")
        class MeanOfUser(Mixer):
            facts = Facts("none", "none", "any size")

            def __init__(self, channels, *, size=None, device=None, dtype=None):
                super().__init__()
                self.gain = nn.Parameter(torch.ones(channels, 1, 1, device=device, dtype=dtype))

            def forward(self, x):
                return self.gain * x.mean((-2, -1), keepdim=True).expand_as(x)

        slot = create_slot("mean-of-user", C, (8, 8))
        assert slot(maps(8, 8)).shape == (2, C, 8, 8)
        assert isinstance(slot, Residual)
        assert "mean-of-user" in MIXERS.list("*-of-user")
        with pytest.raises(ValueError, match="already registered"):
            register_mixer("mean-of-user")(type("Other", (Mixer,), {}))
    finally:
        MIXERS._classes.pop("mean-of-user", None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@each_mixer
def test_gpu_agrees_with_cpu(name, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # torch's default for convolutions
    m = make(name).eval()
    gpu = copy.deepcopy(m).cuda()
    for size in ((8, 8), (7, 9), (15, 20), (90, 66), (1, 1)):
        x = maps(*size)
        a, b = x.clone().requires_grad_(), x.cuda().requires_grad_()
        y, z = m(a), gpu(b)
        assert relative(z.cpu(), y) < 1e-4, size
        y.square().sum().backward()
        z.square().sum().backward()
        assert relative(b.grad.cpu(), a.grad) < 1e-3, size
        for dtype, tolerance in ((torch.bfloat16, 0.05), (torch.float16, 0.01)):
            with torch.autocast("cuda", dtype):
                assert relative(gpu(x.cuda()).cpu(), y) < tolerance, (size, dtype)
