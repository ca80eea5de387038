"""YAML of plain values, with limits: a few lines of it can stand for more values than memory holds."""

import re
from pathlib import Path
from typing import Any

import yaml

MAX_YAML_BYTES = 2**20
MAX_YAML_VALUES = 100_000
MAX_YAML_DEPTH = 50


class _Loader(yaml.SafeLoader):
    pass


class _Dumper(yaml.SafeDumper):
    pass


for _side in (_Loader, _Dumper):  # YAML 1.1 takes 1e-3 for a string; here it is a number
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
    )


def read_yaml(file: Path) -> Any:
    """Return the content of a YAML file of plain values: a recipe, or the config of a run.

    Raises:
        ValueError: if it is not YAML, or larger than any recipe; the message is one line that names the file.
    """
    if (size := file.stat().st_size) > MAX_YAML_BYTES:
        raise ValueError(f"{file}: {size} bytes: a recipe has less than {MAX_YAML_BYTES}")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise ValueError(f"{file}: not text ({e})") from None
    return parse_yaml(text, str(file))


def parse_yaml(text: str, where: str) -> Any:
    """Return the plain values of a YAML text.

    Raises:
        ValueError: if it is not YAML, or stands for more values than any recipe; the message is one line.

    >>> parse_yaml("lr: 1e-3", "recipe")
    {'lr': 0.001}
    """
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _count_values(node, {}, 0)
        return loader.construct_document(node)
    except (yaml.YAMLError, ValueError) as e:  # ValueError: an impossible date or number
        raise ValueError(f"{where}: not YAML ({' '.join(str(e).split())})") from None
    except RecursionError:
        raise ValueError(f"{where}: nested too deeply") from None
    finally:
        if loader is not None:
            loader.dispose()


def _count_values(node: yaml.Node, counted: dict[int, int], depth: int) -> int:
    """Return how many values a YAML node stands for, aliases written out; raise ValueError if they are too many.

    A few lines of anchors that refer to each other can stand for more values than memory holds.
    """
    if depth > MAX_YAML_DEPTH:
        raise ValueError(f"more than {MAX_YAML_DEPTH} levels deep, or an anchor that contains itself")
    if id(node) not in counted:
        total = 1
        if isinstance(node, yaml.CollectionNode):
            for child in node.value:
                for part in child if isinstance(child, tuple) else (child,):
                    total += _count_values(part, counted, depth + 1)
        if total > MAX_YAML_VALUES:
            raise ValueError(f"its anchors stand for more than {MAX_YAML_VALUES} values")
        counted[id(node)] = total
    return counted[id(node)]


def write_yaml(content: Any) -> str:
    """Return plain values as YAML, with keys in their order."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False)
