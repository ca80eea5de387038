"""What the build of the site needs beside Sphinx.

generate.py   writes the pages that are made from the code: tables, promises, copies of files outside docs/
commands.py   writes the reference of the command line from what `--help` says
pictures.py   computes the data of the interactive pictures
reference.py  repairs signatures and members of classes in the API reference
fold.py       folds the long tables of pages with results
links.py      lets links to files outside docs/ lead to their copies on the site
check.py      checks the built HTML: every local link and anchor exists, nothing is loaded from another host
"""
