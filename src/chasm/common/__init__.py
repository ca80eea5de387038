"""What every package uses. This package imports no other.

registry.py    names to classes, with errors that suggest similar names
extensions.py  files of your own (--with) and plug-ins of installed packages
files.py       atomic writes and JSON
locks.py       a lock that ends with its process
signals.py     the signals that ask a process to stop
building.py    hooks that watch a network while it is built
cost.py        how operators report their multiply-adds
devices.py     the device to use, and calls that wait for the host
tracing.py     whether code is compiled, exported or transformed
precision.py   what autocast and TF32 may touch
provenance.py  hardware, versions, commit and command of a result
tables.py      Markdown and terminal tables
progress.py    the progress bar
text.py        words of messages, and sizes on a command line
extras.py      what the extras install, and advice if a package is missing
"""
