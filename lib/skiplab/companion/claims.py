"""The claims of data/claims.yaml with the rules that decide them, read strictly.

The file explains the vocabulary. Bad input is one line that names the entry, the field, and what is allowed.
"""

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from reprlib import repr as short

import yaml

from skiplab import files
from skiplab.companion import fingerprint
from skiplab.errors import InputError, unknown

CLAIMS = files.ROOT / "data" / "claims.yaml"
TIERS = ("quick", "gpu", "paper")
VAGUE, DISAGREE, UNCHECKABLE = "vague", "sources disagree", "cannot be checked from our sources"
PAPER, OURS, THIRD_PARTY = WHOSE = ("paper", "ours", "third party")
OPS = ("below", "above", "within")


@dataclass(frozen=True)
class Test:
    """Ask whether an interval lies `above` or `below` a threshold, or `within` a distance from the claim's value.

    `least` is the smallest effect of interest, seen from the threshold, `most` the largest that the claim allows.
    """

    op: str
    threshold: float
    least: float = 0.0
    most: float = math.inf
    seeds: int = 0


@dataclass(frozen=True)
class Rule:
    """How a claim is decided; data/claims.yaml explains the kinds."""

    kind: str
    statistic: str = ""
    seeds: int = 0
    cases: int = 0
    repetitions: int = 0
    choose: str = ""
    test: Test | None = None
    lower: Test | None = None
    verdict: str = ""
    evidence: str = ""


@dataclass(frozen=True)
class Claim:
    """One claim: of a paper, ours about it, or a third party's. `needs` must be true before it is decided."""

    id: str
    paper: str
    where: str
    statement: str
    notebook: str
    tier: str
    rule: Rule
    value: float | tuple[float, ...] | None = None
    unit: str = ""
    tolerance: float = 0.0
    why: str = ""
    whose: str = PAPER
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Claims:
    """What data/claims.yaml holds: claims by id, each paper's citation, each need in words."""

    claims: dict[str, Claim]
    papers: dict[str, str]
    needs: dict[str, str]


def claims(path: Path = CLAIMS) -> dict[str, Claim]:
    """Return every claim by its id. Raises InputError, in one line that names the entry, where the file is wrong."""
    return dict(_read(path).claims)


def papers(path: Path = CLAIMS) -> dict[str, str]:
    """Return each paper's full citation by its short name."""
    return dict(_read(path).papers)


def notebooks(path: Path = CLAIMS) -> list[str]:
    """Return the names of the notebooks that measure claims, in order."""
    return sorted({claim.notebook for claim in _read(path).claims.values()})


def needs(path: Path = CLAIMS) -> dict[str, str]:
    """Return in words what each need asks for, by its name."""
    return dict(_read(path).needs)


def _read(path: Path) -> Claims:
    try:
        return _parse(path.read_text(encoding="utf-8"))
    except InputError as error:
        raise InputError(f"{path.name}: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error


@lru_cache(maxsize=4)
def _parse(text: str) -> Claims:
    try:
        tree, content = yaml.compose(text, yaml.CSafeLoader), yaml.load(text, yaml.CSafeLoader)
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"not valid YAML: {' '.join(str(error).split())}") from error
    _refuse_duplicates(tree, set())
    fields("file", content, ("papers", "choose", "needs", "claims"), ("shared",))
    for part in ("papers", "choose", "needs", "claims"):
        if not isinstance(content[part], dict):
            raise InputError(f"{part} must be a block of named entries, not {short(content[part])}")
    for part in ("papers", "choose", "needs"):
        for name, line in content[part].items():
            _text(f"{part}: {name}", line)
    read = READ | {"notebook": partial(choice, allowed=fingerprint.notebooks())}
    result = {}
    for name, entry in content["claims"].items():
        try:
            result[name] = _claim(name, entry, content, read)
        except InputError as error:
            raise InputError(f"{name}: {error}") from error
    return Claims(result, content["papers"], content["needs"])


def _refuse_duplicates(node: yaml.Node | None, seen: set[int]) -> None:
    """Refuse a key given twice in one block, of which YAML would silently keep the last."""
    if id(node) in seen or not isinstance(node, yaml.CollectionNode):
        return
    seen.add(id(node))
    keys = set()
    for item in node.value:
        if isinstance(node, yaml.MappingNode):
            key, item = item
            if str(key.value) in keys:
                raise InputError(f"{key.value!r} is given twice (line {key.start_mark.line + 1})")
            keys.add(str(key.value))
        _refuse_duplicates(item, seen)


def fields(kind: str, entry: object, required: Collection[str], optional: Collection[str] = ()) -> None:
    """Refuse a block that lacks a field or has an unknown one."""
    if not isinstance(entry, dict):
        raise InputError(f"{kind} must be a block of fields, not {short(entry)}")
    for name in entry:
        choice(f"field of {kind}", name, {*required, *optional})
    for name in sorted(set(required) - entry.keys()):
        raise InputError(f"{kind} lacks {name!r}")


def choice(kind: str, value: object, allowed: Collection[str]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise unknown(kind, value, allowed)
    return value


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{name} must be text, not {short(value)}")
    return value


def _number(name: str, value: object, least: float = -math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < math.inf:
        hint = " (YAML reads 3e-4 as text: write 3.0e-4)" if isinstance(value, str) else ""
        raise InputError(f"{name} must be a finite number{' >= 0' if least == 0 else ''}, not {short(value)}{hint}")
    return float(value)


def _count(name: str, value: object, least: int = 1) -> int:
    if type(value) is not int or value < least:
        hint = ": one value has no interval" if least == 2 else ""
        raise InputError(f"{name} must be a whole number >= {least}, not {short(value)}{hint}")
    return value


def _value_or_values(name: str, value: object) -> float | tuple[float, ...]:
    return tuple(_number(name, item) for item in value) if isinstance(value, list) else _number(name, value)


def _names(name: str, value: object) -> tuple[str, ...]:
    return tuple(_text(name, item) for item in value) if isinstance(value, list) else (_text(name, value),)


def _test(name: str, entry: object, kind: str, value: object) -> Test:
    """Read a test. Where no smallest effect of interest is given, it is half of the value's."""
    ops = OPS if kind in ("timing", *INTERVALS) else OPS[:2]
    sizes = () if kind in WHOLE else ("least", "most")
    fields(name, entry, ("seeds",) if kind in INTERVALS else (), (*sizes, *ops))
    given = [op for op in ops if op in entry]
    if len(given) != 1:
        raise InputError(f"{name} needs exactly one of {', '.join(ops)}")
    op = given[0]
    threshold = _number(op, entry[op], 0 if op == "within" else -math.inf)
    parts = {part: _number(part, entry[part], 0) for part in sizes if part in entry}
    if parts and op == "within":
        raise InputError(f"{name}: least and most go with above and below, not with within")
    if sizes and op != "within" and "least" not in parts:
        if not isinstance(value, float):
            raise InputError(f"{name} needs least, the smallest effect of interest, where the claim has no value")
        parts["least"] = abs(value - threshold) / 2
    return Test(op, threshold, **parts, seeds=_count("seeds", entry["seeds"], 2) if "seeds" in entry else 0)


FIXED = (VAGUE, DISAGREE, UNCHECKABLE)
WHOLE = ("timing", "exact")  # the range of times decides, or the one number there is: no smallest effect
INTERVALS = ("number", "equivalence")  # compared with a value, or below the tier by `lower` with seeds of its own
# kind of rule -> the fields it must have, those it may have, and those its claim must have
KINDS = {
    "number": (("statistic", "seeds", "choose"), ("lower",), ("value", "unit", "tolerance")),
    "equivalence": (("statistic", "seeds", "choose"), ("lower",), ("value", "unit", "tolerance")),
    "effect": (("statistic", "seeds", "choose", "test"), (), ("unit",)),
    "share": (("statistic", "cases", "test"), (), ("unit",)),
    "exact": (("statistic",), ("test",), ("unit",)),
    "timing": (("statistic", "repetitions", "test"), ("lower",), ("unit",)),
    "statement": (("statistic", "cases"), (), ()),
    "fixed": (("verdict", "evidence"), ("statistic",), ()),
}
# how each field is read
READ = {
    **dict.fromkeys(("where", "statement", "unit", "why", "statistic", "evidence", "choose"), _text),
    **dict.fromkeys(("cases", "repetitions"), _count),
    "seeds": partial(_count, least=2),
    "value": _value_or_values,
    "tolerance": partial(_number, least=0),
    "tier": partial(choice, allowed=TIERS),
    "whose": partial(choice, allowed=WHOSE),
    "needs": _names,
    "kind": partial(choice, allowed=KINDS),
    "verdict": partial(choice, allowed=FIXED),
}


def _claim(name: object, entry: object, content: dict, read: dict) -> Claim:
    if not isinstance(name, str) or not re.fullmatch(r"[a-z0-9_]+(\.[a-z0-9_]+)+", name):
        raise InputError("an id is lower-case words joined by dots, such as asa.skip.both")
    paper = choice("paper", name.split(".")[0], content["papers"])
    optional = ("value", "unit", "tolerance", "why", "whose", "needs")
    fields("claim", entry, ("where", "statement", "notebook", "tier", "rule"), optional)
    parts = {part: read[part](part, entry[part]) for part in entry if part != "rule"}
    rule = _rule(entry["rule"], content["choose"], parts.get("value"))
    needed = {*KINDS[rule.kind][2], *(("why",) if "tolerance" in entry else ())}
    for missing in sorted(needed - entry.keys()):
        raise InputError(f"claim with a {rule.kind} rule lacks {missing!r}")
    claim = Claim(name, paper, rule=rule, **parts)
    for need in claim.needs:
        choice("need", need, content["needs"])
    _check_value(claim)
    return claim


def _rule(entry: object, choose: Collection[str], value: object) -> Rule:
    if not isinstance(entry, dict) or "kind" not in entry:
        raise InputError("rule must be a block with 'kind'")
    kind = READ["kind"]("kind", entry["kind"])
    required, optional, _ = KINDS[kind]
    fields(f"{kind} rule", entry, ("kind", *required), optional)
    tests = {part: _test(part, entry[part], kind, value) for part in ("test", "lower") if part in entry}
    rule = Rule(**tests, **{part: READ[part](part, entry[part]) for part in entry if part not in tests})
    if rule.choose:
        choice("choose", rule.choose, choose)
    return rule


def _check_value(claim: Claim) -> None:
    """Refuse a value that its own rule could not decide, or would contradict."""
    rule, value, several = claim.rule, claim.value, isinstance(claim.value, tuple)
    if several != (rule.verdict == DISAGREE) or several and (len(value) < 2 or not claim.tolerance):
        raise InputError(f"{DISAGREE!r} goes with a list of values and a tolerance, and nothing else does")
    if rule.kind == "exact" and not rule.test and (value is None or not claim.tolerance):
        raise InputError("an exact rule needs a test, or the claim a value and a tolerance")
    for name in ("test", "lower"):
        test = getattr(rule, name)
        if test and test.op == "within" and value is None:
            raise InputError(f"{name} within needs a value to be near")
        if test and test.op != "within" and value is not None:
            beyond = value - test.threshold if test.op == "above" else test.threshold - value
            if not test.least <= beyond <= test.most:
                raise InputError(f"value {value:g} is not what its {name} asks for")
