"""theta -> U = exp(A): against torch.linalg.matrix_exp in float64, and what must never disturb it."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from chasm.common.cost import Tally, measuring
from chasm.ops import orthogonal_basis, skew
from chasm.ops.basis import _NODES, _WEIGHTS, channels_of

NORMS = [0.0, 1e-3, 1.0, 30.0, 100.0]


def theta_of_norm(C: int, norm: float, *batch: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random theta whose skew matrix has this spectral norm."""
    torch.manual_seed(C)
    theta = torch.randn(*batch, C * (C - 1) // 2, dtype=torch.float64)
    if C > 1:
        # A is skew, so A A^T = -A^2 and the largest eigenvalue of that is |A|^2: quick also for C = 1024.
        A = skew(theta)
        theta = theta * (norm / torch.linalg.eigvalsh(-A @ A)[..., -1:].sqrt())
    return theta.to(dtype)


def orthogonality_error(U: Tensor) -> float:
    U = U.double()
    return (U.mT @ U - torch.eye(U.shape[-1], dtype=U.dtype)).abs().max().item()


class MatrixProducts(TorchDispatchMode):
    """Collects the dtypes of all matrix products, and refuses to let a value reach the host."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "equal", "is_nonzero"), f"{name} synchronises"
        if name in ("mm", "bmm", "addmm", "baddbmm", "matmul"):
            self.dtypes.update(a.dtype for a in args if isinstance(a, Tensor))
        return func(*args, **(kwargs or {}))


def test_skew_holds_theta_row_by_row_below_the_diagonal() -> None:
    A = skew(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))
    assert A.tolist() == [[0, -1, -2, -4], [1, 0, -3, -5], [2, 3, 0, -6], [4, 5, 6, 0]]


@pytest.mark.parametrize("C", [1, 2, 3, 8, 33, 96, 1024])
def test_channels_are_found_from_the_number_of_entries(C: int) -> None:
    assert channels_of(C * (C - 1) // 2) == C


@pytest.mark.parametrize("entries", [2, 4, 5, 7, 4559])
def test_a_number_of_entries_that_fits_no_triangle_is_refused(entries: int) -> None:
    with pytest.raises(ValueError, match=rf"C\(C-1\)/2 entries for some C, got {entries}$"):
        orthogonal_basis(torch.zeros(entries))


@pytest.mark.parametrize("C", [1, 2, 3, 8, 33, 96])
@pytest.mark.parametrize("norm", NORMS)
def test_values_and_gradients_against_matrix_exp(C: int, norm: float) -> None:
    theta = theta_of_norm(C, norm, 2).requires_grad_()
    mine, theirs = orthogonal_basis(theta), torch.linalg.matrix_exp(skew(theta))
    assert mine.shape == (2, C, C)
    assert mine.dtype == torch.float64
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)
    weight = torch.randn_like(theirs)
    (a,) = torch.autograd.grad((mine * weight).sum(), theta)
    (b,) = torch.autograd.grad((theirs * weight).sum(), theta)
    assert (a - b).norm() <= 1e-10 * max(b.norm().item(), 1.0)


def test_two_channels_against_cosine_and_sine() -> None:
    angle = torch.linspace(-20, 20, 801, dtype=torch.float64)
    expected = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1).view(-1, 2, 2)
    torch.testing.assert_close(orthogonal_basis(angle[:, None]), expected, rtol=0, atol=1e-12)


def test_nodes_of_the_gradient_in_float32() -> None:
    w = torch.linspace(0, 1.2, 1000, dtype=torch.float64)
    mean = sum(c * torch.cos(s * w) for c, s in zip(_WEIGHTS, _NODES, strict=True))
    torch.testing.assert_close(mean, torch.sinc(w / torch.pi), rtol=0, atol=5.1e-9)


def test_zero_theta_is_the_identity_exactly() -> None:
    for C in (1, 2, 9):
        assert torch.equal(orthogonal_basis(torch.zeros(C * (C - 1) // 2)), torch.eye(C))


def test_any_batch_is_the_stack_of_single_bases() -> None:
    theta = theta_of_norm(5, 3.0, 2, 3)
    U = orthogonal_basis(theta)
    assert U.shape == (2, 3, 5, 5)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(U[i, j], orthogonal_basis(theta[i, j]), rtol=0, atol=1e-13)
    assert orthogonal_basis(torch.zeros(0, 10)).shape == (0, 5, 5)


def test_gradcheck() -> None:
    for C in (2, 4):
        assert torch.autograd.gradcheck(orthogonal_basis, theta_of_norm(C, 2.0, 2).requires_grad_())


@pytest.mark.parametrize("C", [2, 96, 257])
@pytest.mark.parametrize("norm", NORMS)
def test_orthogonal_in_float32(C: int, norm: float) -> None:
    theta = theta_of_norm(C, norm, dtype=torch.float32)
    U = orthogonal_basis(theta)
    assert U.dtype == torch.float32
    assert orthogonality_error(U) <= 1e-5
    torch.testing.assert_close(
        U.double(), torch.linalg.matrix_exp(skew(theta.double())), rtol=0, atol=1e-6 if norm < 50 else 1e-5
    )


def test_orthogonal_in_float32_at_1024_channels_and_norm_100() -> None:
    U = orthogonal_basis(theta_of_norm(1024, 100.0, dtype=torch.float32))
    assert orthogonality_error(U) <= 1e-5


@pytest.mark.parametrize(("norm", "tolerance"), [(200.0, 1e-13), (450.0, 1e-8)])
@pytest.mark.parametrize("C", [2, 33])
def test_accuracy_beyond_the_norms_of_training(C: int, norm: float, tolerance: float) -> None:
    theta = theta_of_norm(C, norm)
    w, V = torch.linalg.eigh(1j * skew(theta))
    exact = ((V * torch.exp(-1j * w)) @ V.mH).real
    torch.testing.assert_close(orthogonal_basis(theta), exact, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_theta_gives_a_float32_basis(dtype: torch.dtype) -> None:
    theta = theta_of_norm(16, 10.0, dtype=dtype)
    U = orthogonal_basis(theta)
    assert U.dtype == torch.float32
    assert orthogonality_error(U) <= 1e-5
    torch.testing.assert_close(U, orthogonal_basis(theta.float()), rtol=0, atol=0)


def test_global_precision_switches_do_not_reach_the_basis() -> None:
    theta = theta_of_norm(64, 40.0, dtype=torch.float32)
    plain = orthogonal_basis(theta)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")  # TF32 on a GPU, bf16 products on some CPUs
        assert torch.equal(orthogonal_basis(theta), plain)
    finally:
        torch.set_float32_matmul_precision(before)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            assert torch.equal(orthogonal_basis(theta), plain)
        assert plain.dtype == torch.float32


def test_every_matrix_product_is_float64_and_nothing_synchronises() -> None:
    """What makes the basis immune to TF32, seen without a GPU: no product in a precision that TF32 applies to."""
    theta = theta_of_norm(8, 5.0, dtype=torch.float32).requires_grad_()
    for dtype in (torch.float32, torch.bfloat16):
        cast = torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16)
        with MatrixProducts() as seen, cast, measuring(Tally()):  # while somebody counts, arithmetic can be seen
            orthogonal_basis(theta).square().sum().backward()
        assert seen.dtypes == {torch.float64}


def test_runs_without_values() -> None:
    assert orthogonal_basis(torch.zeros(3, 15, device="meta")).shape == (3, 6, 6)
    with FakeTensorMode():
        theta = torch.randn(15).requires_grad_()
        orthogonal_basis(theta).sum().backward()
        assert theta.grad is not None


def test_one_recorded_graph_serves_every_value() -> None:
    """Recorded at theta = 0, replayed at norm 100: the operations do not depend on the values (CUDA graphs)."""
    recorded = make_fx(orthogonal_basis)(torch.zeros(28, dtype=torch.float64))
    theta = theta_of_norm(8, 100.0)
    torch.testing.assert_close(recorded(theta), torch.linalg.matrix_exp(skew(theta)), rtol=0, atol=1e-11)


def test_compiles_as_one_graph() -> None:
    torch.compiler.reset()
    compiled = torch.compile(orthogonal_basis, fullgraph=True, backend="aot_eager")
    a = theta_of_norm(6, 4.0, 2).requires_grad_()
    b = a.detach().clone().requires_grad_()
    U, V = compiled(a), orthogonal_basis(b)
    torch.testing.assert_close(U, V, rtol=0, atol=1e-12)
    U[0, 0].sum().backward()
    V[0, 0].sum().backward()
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("norm", [0.0, 0.5, 4.0, 100.0])
def test_no_value_decides_the_shapes_that_the_compiler_relies_on(norm: float) -> None:
    theta = theta_of_norm(6, norm, 2) if norm else torch.zeros(2, 15, dtype=torch.float64)
    torch.library.opcheck(torch.ops.chasm.basis.default, (theta,), test_utils="test_faketensor")
    U, kept = torch.ops.chasm.basis.default(theta)
    arguments = torch.randn_like(U), theta, kept
    torch.library.opcheck(torch.ops.chasm.basis_backward.default, arguments, test_utils="test_faketensor")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_orthogonal_on_a_gpu_with_tf32_on(precision: str) -> None:
    theta = theta_of_norm(96, 100.0, 2, dtype=torch.float32).cuda()
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        with torch.autocast("cuda", torch.bfloat16):
            U = orthogonal_basis(theta)
    finally:
        torch.set_float32_matmul_precision(before)
    assert orthogonality_error(U.cpu()) <= 1e-5
    torch.testing.assert_close(U.cpu(), orthogonal_basis(theta.cpu()), rtol=0, atol=1e-5)
