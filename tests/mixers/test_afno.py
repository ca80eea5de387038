import pytest
import torch
from spec_values import check, golden_map, roll, wave
from torch.nn import functional as F

from chasm.mixers import AFNO
from chasm.mixers._spectral import complex_of_pairs

C, H, W = 8, 12, 10


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(2, C, H, W, dtype=torch.float64)


@torch.no_grad()
def identity_weights(bias: float, shrink: float = 0.0) -> AFNO:
    m = AFNO(C, blocks=2, shrink=shrink, dtype=torch.float64)
    for w, b, sign in ((m.w1, m.b1, 1), (m.w2, m.b2, -1)):
        w.copy_(torch.stack((torch.eye(C // 2).expand(2, -1, -1), torch.zeros(2, C // 2, C // 2)), -1))
        b.fill_(sign * bias)
    return m


def split_relu(X):
    return torch.complex(F.relu(X.real), F.relu(X.imag))


def close(a, b, atol):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


def test_zero_second_layer_returns_the_input(x):
    m = AFNO(C, dtype=torch.float64)
    with torch.no_grad():
        m.w2.zero_()
        m.b2.zero_()
    close(m(x), x, 0)


def test_open_relu_doubles(x):
    close(identity_weights(1000.0)(x), 2 * x, 2e-12)


def test_identity_weights_leave_the_split_relu(x):
    X = torch.fft.rfft2(x, norm="ortho")
    close(identity_weights(0.0)(x), x + torch.fft.irfft2(split_relu(X), s=(H, W), norm="ortho"), 1e-14)


@pytest.mark.parametrize(("blocks", "hidden_factor"), [(1, 1), (4, 1), (2, 3)])
def test_equals_native_complex_arithmetic(x, blocks, hidden_factor):
    m = AFNO(C, blocks=blocks, hidden_factor=hidden_factor, dtype=torch.float64)
    with torch.no_grad():
        for p in m.parameters():
            p.mul_(20)
    w1, b1, w2, b2 = (complex_of_pairs(p) for p in (m.w1, m.b1, m.w2, m.b2))
    X = torch.fft.rfft2(x, norm="ortho").reshape(2, blocks, C // blocks, H, -1).movedim(2, -1)
    hidden = split_relu(torch.einsum("bnhwi,nio->bnhwo", X, w1) + b1[:, None, None])
    Y = torch.einsum("bnhwi,nio->bnhwo", hidden, w2) + b2[:, None, None]
    Y = torch.complex(F.softshrink(Y.real, 0.01), F.softshrink(Y.imag, 0.01))
    Y = Y.movedim(-1, 2).reshape(2, C, H, -1)
    close(m(x), x + torch.fft.irfft2(Y, s=(H, W), norm="ortho"), 1e-13)


def test_is_not_shift_equivariant(x):
    m = identity_weights(0.0)
    assert (m(roll(x)) - roll(m(x))).abs().max() > 0.1


def test_shrinkage_zeroes_small_values(x):
    close(identity_weights(0.0, shrink=1e3)(x), x, 0)


def test_golden():
    m = AFNO(32, dtype=torch.float64)
    with torch.no_grad():
        for j, p in enumerate((m.w1, m.b1, m.w2, m.b2)):  # the published layout: (re, im) in front
            p.copy_(wave((2, *p.shape[:-1]), j).movedim(0, -1))
    check(m(golden_map()), -3.96407266, 774.24391615, 1.37374859, -0.04176943)


def test_runs_at_any_size_with_the_same_weights():
    m = AFNO(C, size=(64, 64), dtype=torch.float64)
    assert [tuple(p.shape) for p in AFNO(C).parameters()] == [tuple(p.shape) for p in m.parameters()]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blocks": 3}, "blocks to divide"),
        ({"hidden_factor": 0}, "hidden_factor"),
        ({"shrink": -1.0}, "shrink"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        AFNO(8, **options)
