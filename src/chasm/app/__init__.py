"""Reconstruction in the browser: a page, the network as ONNX in it, and a small server for the local machine.

model.py   writes a run as the files of the page
site.py    writes the page and its models as a folder for any web server
server.py  serves the page on 127.0.0.1, behind a token, and reads files that the page cannot read
static     holds the page; its libraries are in static/vendor, copied by `make web`
"""

from chasm.app.server import serve as serve
from chasm.app.site import build_site as build_site
