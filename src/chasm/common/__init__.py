"""What every package uses. This package imports no other.

registry.py    names to classes, with errors that suggest similar names
extensions.py  files of your own (--with) and plug-ins of installed packages
files.py       atomic writes and JSON
locks.py       a lock that ends with its process
precision.py   what autocast and TF32 may touch
provenance.py  hardware, versions, commit and command of a result
tables.py      Markdown and terminal tables
progress.py    the progress bar
text.py        numbers with their nouns
extras.py      what the extras install, and advice if a package is missing
"""
