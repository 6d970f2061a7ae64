"""YAML as a person means it: a key that is given twice is an error, where PyYAML takes the last one without a word."""

from pathlib import Path
from typing import Any

import yaml

from zaya.errors import UserError


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key, _ in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else None
            if name is not None and (key.tag, name) in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {name} is given twice; remove one of the two", key.start_mark
                )
            seen.add((key.tag, name))
        return super().construct_mapping(node, deep)


def parse(text: str) -> Any:
    """The value of a YAML text. Raises UserError with one line, and no file name, when it is none."""
    try:
        return yaml.load(text, _Loader)
    except yaml.constructor.ConstructorError as e:
        where = f", line {e.problem_mark.line + 1}" if e.problem_mark else ""
        raise UserError(f"not valid YAML: {e.problem}{where}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        raise UserError(f"not valid YAML: {' '.join(str(e).split())}") from None


def read(path: Path, what: str, example: str) -> dict[Any, Any]:
    """The mapping in a YAML file. Raises UserError in one line; `example` is a file to start from."""
    try:
        values = parse(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such {what}; {example} is one to start from") from None
    except (IsADirectoryError, UnicodeDecodeError):
        raise UserError(f"{path}: not a {what} file; name a YAML file") from None
    except UserError as e:
        raise UserError(f"{path}: {e}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: a {what} is a mapping of keys to values; see {example}")
    return values
