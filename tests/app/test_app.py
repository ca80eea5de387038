"""The page without a browser: its files, its model, its server. tests/interop/test_app_page.py opens it in Chromium."""

import gzip
import hashlib
import http.client
import json
import re
import shutil
import socket
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import onnx
import pytest
import torch
from typer.testing import CliRunner

from chasm.app import server
from chasm.app.model import ForPage, _make_graph, graph_of
from chasm.app.site import STATIC, VENDOR, build_site
from chasm.cli.app import app
from chasm.common.files import sha256
from chasm.models import RECORD
from chasm.train import Run, load_run

sys.path.insert(0, str(Path(__file__).parents[1] / "reconstruct"))
sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
from runs import make_run
from writers import write_dicom

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "small", size=32, weights="random")


@pytest.fixture(scope="module")
def site(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without a network in it: to export one takes longer than all the rest, and the tests in a browser do it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr("chasm.app.model._make_graph", lambda run: b"onnx")
        return build_site([run], tmp_path_factory.mktemp("site") / "page", convert=True)


def test_every_file_that_a_file_names_is_there(site: Path) -> None:
    for file in site.glob("*.*"):
        for name in re.findall(r"""['"](?:\./)?([\w./-]+\.(?:m?js|css|wasm|json))['"]""", file.read_text()):
            if name != "page.json":
                assert (site / name).is_file(), f"{file.name} names {name}"
    assert json.loads((site / "site.json").read_text())["models"] == ["small"]
    assert {p.name for p in (site / "models" / "small").iterdir()} == {
        "model.onnx",
        "model.bin",
        "page.json",
        "example.npy",
    }


def test_no_file_of_the_page_names_another_host() -> None:
    for file in STATIC.glob("*.*"):
        assert not re.findall(r"https?://[\w.]+", file.read_text()), file.name
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', (STATIC / "index.html").read_text())
    assert policy
    assert "default-src 'none'" in policy[1]
    assert "connect-src 'self' blob: data:" in policy[1]


def test_every_element_that_the_code_asks_for_is_in_the_page() -> None:
    page = (STATIC / "index.html").read_text()
    for name in re.findall(r"\$\('([\w-]+)'\)", (STATIC / "app.js").read_text()):
        assert f'id="{name}"' in page, name


def test_the_libraries_are_those_of_the_lock_file() -> None:
    manifest = json.loads((VENDOR / "manifest.json").read_text())
    for name, digest in manifest["sha256"].items():
        content = gzip.decompress((VENDOR / f"{name}.gz").read_bytes())
        assert hashlib.sha256(content).hexdigest() == digest, name
    locked = json.loads((ROOT / "web" / "package-lock.json").read_text())["packages"]
    wanted = json.loads((ROOT / "web" / "package.json").read_text())["dependencies"]
    for name, version in wanted.items():
        assert manifest["packages"][name] == locked[f"node_modules/{name}"]["version"] == version
    licences = (VENDOR / "LICENCES.txt").read_text()
    assert all(f"\n{name} {version} (" in licences for name, version in manifest["packages"].items())


def test_bands_of_one_change_nothing_and_others_do(run: Path) -> None:
    model = load_run(run).model
    page = ForPage(model)
    x, mask = torch.randn(1, 2, 40, 36), (torch.arange(36) % 4 == 0).float().reshape(1, 1, 1, 36)
    with torch.no_grad():
        torch.testing.assert_close(page(x, mask, torch.ones(5)), model(x, mask=mask), atol=1e-5, rtol=1e-4)
        for band in range(5):
            factors = torch.ones(5)
            factors[band] = 0
            assert (page(x, mask, factors) - model(x, mask=mask)).abs().max() > 1e-4


def test_what_the_page_shows_of_the_mixers(site: Path, run: Path) -> None:
    (mixer,) = json.loads((site / "models" / "small" / "page.json").read_text())["mixers"]
    operator = load_run(run).model.slots["0"].operators(32, 32)["ch"]  # type: ignore[index, union-attr, operator]
    np.testing.assert_allclose(mixer["axes"]["ch"]["gains"], operator.gains.detach().numpy(), atol=1e-3)
    np.testing.assert_allclose(mixer["axes"]["ch"]["basis"], operator.U.detach().numpy(), atol=1e-3)


def test_a_folder_with_other_files_is_left_alone(run: Path, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(ValueError, match="holds other files"):
        build_site([run], tmp_path)


@pytest.fixture(scope="module")
def served(site: Path) -> Iterator[server.SiteServer]:
    with server.make_server(site) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def ask(served: server.SiteServer, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", served.server_port, timeout=20)
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_the_server_answers_to_the_token_on_this_machine_only(served: server.SiteServer) -> None:
    assert urlsplit(served.address).hostname == "127.0.0.1"
    assert served.server_address[0] == "127.0.0.1"
    page = f"/{served.token}/"
    status, content = ask(served, "GET", page)
    assert status == 200
    assert b"<title>CHASM" in content
    assert ask(served, "GET", "/")[0] == 403
    assert ask(served, "GET", "/index.html")[0] == 403
    assert ask(served, "GET", f"/{served.token[:-1]}x/")[0] == 403
    assert ask(served, "GET", page, Host="evil.example")[0] == 403
    assert ask(served, "POST", f"{page}convert", Origin="http://evil.example")[0] == 403
    for path in ("../../etc/passwd", "%2e%2e/%2e%2e/secret", "nothing.js", "/etc/passwd"):
        assert ask(served, "GET", page + path)[0] == 404, path


def test_the_server_reads_what_the_page_cannot(served: server.SiteServer, tmp_path: Path) -> None:
    volume = np.random.default_rng(0).random((3, 32, 24)).astype(np.float32)
    np.save(tmp_path / "scan.npy", volume)
    status, content = ask(
        served, "POST", f"/{served.token}/convert?name=scan.npy", (tmp_path / "scan.npy").read_bytes()
    )
    assert status == 200
    length = int.from_bytes(content[:4], "little")
    facts = json.loads(content[4 : 4 + length])
    assert (facts["count"], facts["height"], facts["width"], facts["complex"]) == (3, 32, 24, False)
    np.testing.assert_array_equal(np.frombuffer(content[4 + length :], "<f4").reshape(3, 32, 24), volume)


def test_the_place_of_a_converted_scan_comes_with_it(served: server.SiteServer, tmp_path: Path) -> None:
    place = {"ImagePositionPatient": [10, 20, 30], "ImageOrientationPatient": [1, 0, 0, 0, 1, 0]}
    write_dicom(tmp_path / "a.dcm", np.eye(32), PixelSpacing=[0.5, 0.25], SliceThickness=4, **place)
    _, content = ask(served, "POST", f"/{served.token}/convert?name=a.dcm", (tmp_path / "a.dcm").read_bytes())
    facts = json.loads(content[4 : 4 + int.from_bytes(content[:4], "little")])
    assert facts["spacing"] == [0.25, 0.5, 4]
    assert facts["affine"] == [[-0.25, 0, 0], [0, 0.5, 0], [0, 0, 4], [-10, -20 - 31 * 0.5, 30]]
    assert facts["code"] == 1


def test_wrong_uploads_are_one_line(served: server.SiteServer) -> None:
    convert = f"/{served.token}/convert"
    status, content = ask(served, "POST", f"{convert}?name=../../letter.txt", b"dear")
    assert status == 422
    assert b"letter.txt" in content
    assert b"chasm-app-" not in content
    assert b"\n" not in content
    status, content = ask(served, "POST", f"{convert}?name=scan.cfl", b"12345678")
    assert (status, b"scan.cfl: one file of a BART pair" in content) == (422, True)
    assert ask(served, "POST", convert, b"", **{"Content-Length": str(3 * 2**30)})[0] == 413
    assert ask(served, "POST", f"/{served.token}/other", b"x")[0] == 404


@pytest.mark.parametrize(
    ("request_line", "more", "status"),
    [
        ("GET /{token}/a%00b", "", 404),
        ("GET /{token}/" + 5000 * "a", "", 404),
        ("GET *", "", 403),
        ("GET nothing", "", 403),
        ("GET /{token}/", "Origin: http://[", 403),
        ("GET /{token}/", "Origin: null", 403),
        ("GET /{token}/", "Origin: https://127.0.0.1:{port}", 403),
        ("POST /{token}/convert?name=a.npy", "Content-Length: \xb2", 413),
        ("POST /{token}/convert?name=a.npy", "Content-Length: " + 5000 * "9", 413),
        ("POST /{token}/convert?name=a.npy", "Content-Length: -1", 413),
        ("POST /{token}/convert?name=..", "Content-Length: 2", 422),
        ("POST /{token}/convert?name=a%00.npy", "Content-Length: 2", 422),
        ("POST /{token}/convert?name=" + 300 * "a" + ".npy", "Content-Length: 2", 422),
        ("POST /{token}/convert?name=..%5c..%5ca.npy", "Content-Length: 2", 422),
    ],
)
def test_an_odd_request_has_an_answer_and_no_traceback(
    served: server.SiteServer, request_line: str, more: str, status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    port = served.server_port
    text = f"{request_line} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n{more}\r\n\r\nno"
    text = text.replace("{token}", served.token).replace("{port}", str(port))
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(text.encode("latin1"))
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(2**16), b""))
    assert answer.split()[1] == str(status).encode(), answer
    assert "Traceback" not in capfd.readouterr().err
    assert b"\\" not in answer


def test_the_name_in_a_record_leads_nowhere(run: Path, tmp_path: Path) -> None:
    """A model of somebody else names the folder of its page."""
    copy = Path(shutil.copytree(run, tmp_path / "model"))
    digests = {name: sha256(copy / name) for name in ("config.yaml", "weights.safetensors")}
    for name in ("../../outside", "/tmp/outside", "..", "", 7, None):
        (copy / RECORD).write_text(json.dumps({"name": name, "sha256": digests}))
        with pytest.raises(ValueError, match=r"model\.json: name: expected one that a folder can have"):
            build_site([copy], tmp_path / "site" / "page")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_a_taken_port_is_one_line(served: server.SiteServer, site: Path) -> None:
    with pytest.raises(OSError, match="choose another --port"):
        server.make_server(site, served.server_port)


def test_the_command_writes_the_page_and_says_what_is_wrong(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("chasm.app.model._make_graph", lambda run: b"onnx")
    done = CliRunner().invoke(app, ["app", str(run), "-o", str(tmp_path / "page")])
    assert done.exit_code == 0, done.output
    assert "python3 -m http.server" in done.output
    assert json.loads((tmp_path / "page" / "site.json").read_text())["convert"] is False
    monkeypatch.setattr("chasm.app.site.list_models", list)
    for words, expected in (
        (["app", "-o", str(tmp_path / "other")], "no model comes with this installation"),
        (["app", "brain-x88", "-o", str(tmp_path / "other")], "brain-x88: no such run folder or model"),
        (["app", str(run), str(run), "-o", str(tmp_path / "other")], "two models are called 'small'"),
    ):
        failed = CliRunner().invoke(app, words)
        assert failed.exit_code == 3
        assert expected in failed.output


def test_a_graph_is_made_once_for_all_weights_of_an_architecture(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def make(run: Run) -> bytes:
        made.append(run.folder)
        return b"onnx"

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("chasm.app.model._make_graph", make)
    other = make_run(tmp_path / "other" / "small", size=32)
    larger = make_run(tmp_path / "larger" / "small", size=48)
    for folder, source in (("a", run), ("b", other), ("c", larger)):
        build_site([source], tmp_path / folder)
        assert (tmp_path / folder / "models" / "small" / "model.onnx").read_bytes() == b"onnx"
    assert made == [run, larger]
    monkeypatch.setattr("chasm.app.model.source_digest", lambda: "other code")
    graph_of(load_run(other))
    assert made == [run, larger, other]
    weights = [(tmp_path / folder / "models" / "small" / "model.bin").read_bytes() for folder in ("a", "b")]
    assert weights[0] != weights[1]


def test_the_graph_of_a_large_network_is_not_compared_node_by_node(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The patterns of onnxscript compare each node with all others: half a minute for a varnet."""

    def refuse(*_: object) -> None:
        raise AssertionError("patterns are searched")

    monkeypatch.setattr("onnxscript.rewriter.RewriteRuleSet.apply_to_model", refuse)
    nodes = onnx.load_from_string(_make_graph(load_run(run))).graph.node
    named = [tuple(name for name in (*node.input, *map(str, node.attribute)) if name) for node in nodes]
    repeated = Counter(zip((node.op_type for node in nodes), named, strict=True)).most_common(1)[0]
    assert repeated[1] == 1, repeated  # nothing is computed twice
    assert not [node.name for node in nodes if node.op_type == "Constant"]


def test_a_home_that_cannot_be_written_to_is_no_hindrance(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, content: bytes) -> None:
        raise PermissionError(str(path))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("chasm.app.model._make_graph", lambda run: b"onnx")
    monkeypatch.setattr("chasm.app.model.write_bytes", refuse)
    assert graph_of(load_run(run)) == b"onnx"


def test_several_coils_become_one_complex_image() -> None:
    y, x = torch.meshgrid(torch.linspace(-1, 1, 48), torch.linspace(-1, 1, 40), indexing="ij")
    radius = x**2 + y**2
    image = (radius < 0.7) * (1 + 0.5 * torch.cos(6 * x)) * torch.exp(0.8j * y)
    maps = torch.stack([torch.exp(-((x - a) ** 2 + y**2) + 1j * a * x) for a in (-1.0, 0.0, 1.0)])
    maps = maps / (maps.abs() ** 2).sum(0).sqrt()
    combined = server.combine_coils(maps * image)
    assert combined.shape == (1, 48, 40)
    inside = radius < 0.5
    error = (combined[0].abs() - image.abs())[inside].norm() / image[inside].norm()
    assert error < 0.03


def test_an_upload_that_breaks_off_leaves_the_server_alive(
    served: server.SiteServer, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tab that is closed during the upload: no traceback, no file left, and the next request is answered."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with socket.create_connection(("127.0.0.1", served.server_port)) as connection:
        head = f"POST /{served.token}/convert?name=a.npy HTTP/1.1\r\nHost: 127.0.0.1:{served.server_port}\r\n"
        connection.sendall(f"{head}Content-Length: 1000000\r\n\r\nshort".encode())
        deadline = time.monotonic() + 10
        while not any(tmp_path.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert any(tmp_path.iterdir())
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, no goodbye
    assert ask(served, "GET", f"/{served.token}/")[0] == 200
    while any(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(tmp_path.iterdir())
    assert "Traceback" not in capfd.readouterr().err
