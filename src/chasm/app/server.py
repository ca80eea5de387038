"""Serve the page on 127.0.0.1, only for requests with the secret token in its address."""

import json
import mimetypes
import re
import secrets
import struct
import tempfile
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np
from torch import Tensor

from chasm.mri import estimate_maps, fft2c
from chasm.reconstruct.inputs import Scan, open_scan

MAX_UPLOAD = 768 * 2**20
CHUNK = 2**20
CALIBRATION = 32  # columns in the middle of k-space that coil sensitivities are estimated from
TYPES = {
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".wasm": "application/wasm",
    ".onnx": "application/octet-stream",
}
HEADERS = {
    "Cross-Origin-Opener-Policy": "same-origin",  # with the next one: threads in WebAssembly
    "Cross-Origin-Embedder-Policy": "require-corp",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def serve(site: Path, port: int = 0, on_ready: Callable[[str], None] = lambda address: None) -> None:
    """Serve a site until Ctrl-C.

    Args:
        site: a folder that `build_site` wrote.
        port: port of 127.0.0.1; 0 takes a free one.
        on_ready: called with the address, which holds the token.

    Raises:
        OSError: if the port is taken.
    """
    with make_server(site, port) as server:
        on_ready(server.address)
        server.serve_forever()


def make_server(site: Path, port: int = 0) -> "SiteServer":
    """Return the server of a site, bound to 127.0.0.1 and not yet running.

    Args:
        site: a folder that `build_site` wrote.
        port: 0 takes a free one.
    """
    try:
        return SiteServer(site, port)
    except OSError as e:
        raise OSError(f"port {port} cannot be used ({e.strerror}): choose another --port, or leave it out") from None


class SiteServer(ThreadingHTTPServer):
    """A server of one folder.

    Args:
        site: the folder.
        port: port of 127.0.0.1.

    Attributes:
        site: the folder.
        token: the first part of every path that is answered.
        address: address of the page.
    """

    daemon_threads = True

    def __init__(self, site: Path, port: int) -> None:
        self.site, self.token = site.resolve(), secrets.token_urlsafe(16)
        super().__init__(("127.0.0.1", port), _Handler)
        self.address = f"http://127.0.0.1:{self.server_port}/{self.token}/"


class _Handler(BaseHTTPRequestHandler):
    """GET gives out files of the site; POST convert turns a scan into numbers."""

    server: SiteServer
    timeout = 60  # seconds that a silent connection is kept

    def do_GET(self) -> None:
        path = self._path()
        if path is None:
            return
        site = self.server.site
        try:
            file = (site / (path or "index.html")).resolve()
            is_served = file.is_relative_to(site) and file.is_file()
        except (ValueError, OSError):  # no name that a file can have
            is_served = False
        if not is_served:
            return self._answer(HTTPStatus.NOT_FOUND, b"no such file")
        kind = TYPES.get(file.suffix) or mimetypes.guess_type(file.name)[0] or "application/octet-stream"
        self._answer(HTTPStatus.OK, file.read_bytes(), kind)

    def do_POST(self) -> None:
        path = self._path()
        if path is None:
            return
        if path != "convert":
            return self._answer(HTTPStatus.NOT_FOUND, b"no such address")
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch(r"[0-9]{1,12}", length) or int(length) > MAX_UPLOAD:
            self.close_connection = True
            limit = f"larger than {MAX_UPLOAD >> 20} MB: use 'chasm reconstruct'"
            return self._answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, limit.encode())
        with tempfile.TemporaryDirectory(prefix="chasm-app-") as folder:
            file = Path(folder) / file_name(parse_qs(urlsplit(self.path).query).get("name", [""])[0])
            try:
                if not self._receive(file, int(length)):
                    return  # the tab was closed
                content = convert(file)
            except (ValueError, OSError, MemoryError) as e:
                why = " ".join(str(e).split()).replace(f"{folder}/", "")
                return self._answer(HTTPStatus.UNPROCESSABLE_ENTITY, why.encode())
        self._answer(HTTPStatus.OK, content, "application/octet-stream")

    def _receive(self, file: Path, length: int) -> bool:
        """Write the body of a request into a file; return False if it ends early or stops coming."""
        with open(file, "wb") as f:
            while length > 0:
                try:
                    part = self.rfile.read(min(CHUNK, length))
                except (ConnectionError, TimeoutError):
                    part = b""
                if not part:
                    self.close_connection = True
                    return False
                f.write(part)
                length -= len(part)
        return True

    def _path(self) -> str | None:
        """Return the path after the token. Answer other requests and those without the token, and return None."""
        hosts = [f"{name}:{self.server.server_port}" for name in ("127.0.0.1", "localhost")]
        origins = [None, *(f"http://{host}" for host in hosts)]
        own = self.headers.get("Host") in hosts and self.headers.get("Origin") in origins
        parts = unquote(self.path.partition("?")[0]).split("/", 2)  # "", token, path
        if not own or len(parts) < 3 or not secrets.compare_digest(parts[1].encode(), self.server.token.encode()):
            self._answer(HTTPStatus.FORBIDDEN, b"open the address that 'chasm app' printed")
            return None
        return parts[2]

    def _answer(self, status: HTTPStatus, content: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        try:
            self.send_response(status)
            for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)
        except OSError:  # the tab was closed, or does not read
            self.close_connection = True

    def log_message(self, *args: Any) -> None:
        """Log nothing, because the names of files may be those of patients."""


def file_name(name: str) -> str:
    """Return a file name that is valid on any system, with the suffix of its format.

    >>> file_name("scans/a b.nii.gz"), file_name("../../"), file_name("..")
    ('a_b.nii.gz', 'scan', 'scan')
    """
    last = re.sub(r"[^\w.-]", "_", re.split(r"[/\\]", name)[-1])
    return last[-100:].lstrip(".") or "scan"


def convert(file: Path) -> bytes:
    """Read a scan with chasm's readers for the page: length of a JSON header, the header, float32 numbers.

    Several coils are combined into one complex image, with sensitivities that are estimated from the middle of k-space.

    Args:
        file: the scan.

    Raises:
        ValueError: if it is no scan, or undersampled k-space, which needs `chasm reconstruct`.
    """
    if file.suffix.lower() in (".cfl", ".hdr"):
        raise ValueError(f"{file.name}: one file of a BART pair, and the page reads only one: use 'chasm reconstruct'")
    scan = open_scan(file, phase=True, target="rss")
    if scan.measured is not None:
        raise ValueError(
            f"{file.name}: undersampled k-space, of which the page reads one coil in HDF5: use 'chasm reconstruct'"
        )
    parts, shape, is_complex, coils = [], None, False, 1
    for i in range(len(scan.data)):
        image = scan.data[i].image
        coils = len(image)
        image = combine_coils(image) if coils > 1 else image
        is_complex = image.is_complex()
        planes = [image.real, image.imag] if is_complex else [image]
        if shape not in (None, tuple(image.shape)):
            raise ValueError(f"{file.name}: slices of several sizes")
        shape = tuple(image.shape)
        parts += [np.ascontiguousarray(plane[0].numpy(), dtype="<f4").tobytes() for plane in planes]
    if shape is None:
        raise ValueError(f"{file.name}: no slice in it")
    how = f", {coils} coils combined with estimated sensitivities" if coils > 1 else ""
    facts = {
        "count": len(scan.data),
        "height": shape[-2],
        "width": shape[-1],
        "complex": is_complex,
        "note": scan.read_as + how,
        **_place(scan),
    }
    text = json.dumps(facts).encode()
    text += b" " * (-(len(text) + 4) % 4)  # float32 numbers begin at a multiple of 4
    return struct.pack("<I", len(text)) + text + b"".join(parts)


def _place(scan: Scan) -> dict[str, Any]:
    """Return the position of the slices for the page; nothing if it is unknown, or there are several volumes."""
    cases = scan.data.cases
    geometry = scan.data.geometry(cases[0]) if len(cases) == 1 else None
    if geometry is None:
        return {}
    columns = geometry.affine[:3].T
    return {"affine": columns.tolist(), "code": geometry.code, "spacing": np.linalg.norm(columns[:3], axis=1).tolist()}


def combine_coils(images: Tensor) -> Tensor:
    """Combine images of several coils into one: complex (coils, H, W) -> (1, H, W).

    Args:
        images: images of a fully sampled slice.
    """
    middle, half = images.shape[-1] // 2, min(CALIBRATION, images.shape[-1]) // 2
    maps = estimate_maps(fft2c(images)[None], (middle - half, middle + half))[0]
    return (maps.conj() * images).sum(0, keepdim=True)
