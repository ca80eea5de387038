"""Reconstruction in the browser: a page, the network as ONNX in it, and a small server for the local machine.

model.py   a run as the files that the page needs
site.py    the page and its models as a folder that any web server can give out
server.py  the same on 127.0.0.1, behind a token, with a reader for files that the page cannot read
static     the page; its libraries are in static/vendor, copied by `make web`
"""

from chasm.app.server import serve as serve
from chasm.app.site import build_site as build_site
