"""Jinja for templates that anybody may have written: no reach outside, and bounded work.

Jinja's immutable sandbox keeps a template from Python's insides. What it lacks is a bound: a few
lines can ask for terabytes or for years. So each value that a template makes is paid for by its
size, each round of a loop and each call by a fixed price, out of a budget that one rendering has;
operations whose result may be far larger than what goes in are priced before they are carried out,
and what is compared or searched is paid for by its size each time.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateRuntimeError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

BUDGET = 100_000_000
"""Of one rendering: characters, and items, rounds and calls times their prices."""
_ITEM = 50
"""Price of a value in a list or a table, and of what an iterator yields."""
_ROUND = 500
"""Price of a round of a loop, and of a call."""
_LARGEST_INTEGER = 2**63
_LONGEST_NUMBER = 100
"""Characters of a text that is to become a whole number."""
_MOST_DIGITS = 16
"""To which numbers are rounded."""

GENERATION_BEGINS, GENERATION_ENDS = "\ufdd1", "\ufdd2"
"""Written around what stands in `{% generation %}`; Unicode keeps them out of texts."""

_FILTERS = (
    *("abs", "batch", "capitalize", "count", "d", "default", "dictsort", "first"),
    *("float", "int", "items", "last", "length", "list", "lower", "map", "max", "min", "reject"),
    *("rejectattr", "reverse", "round", "safe", "select", "selectattr", "slice", "sort"),
    *("string", "title", "trim", "unique", "upper"),
)
_PRICED_TESTS = (
    *("==", "!=", "<", "<=", ">", ">=", "eq", "ne", "lt", "le", "gt", "ge", "equalto"),
    *("lessthan", "greaterthan", "in", "lower", "upper"),
)
_GLOBALS = ("range", "dict", "namespace")
_TEXT_METHODS = frozenset(
    (
        *("capitalize", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdigit"),
        *("islower", "isspace", "isupper", "join", "lower", "lstrip", "partition"),
        *("removeprefix", "removesuffix", "replace", "rfind", "rpartition", "rsplit", "rstrip"),
        *("split", "splitlines", "startswith", "strip", "title", "upper"),
    )
)
_CONCAT, _COUNTED, _PAID, _CUT = "concatenated texts", "rounds", "a value", "a slice"
"""Filters of ours; a name with a blank cannot be written in a template."""


class TooMuchWork(TemplateRuntimeError):
    """A rendering has used up its budget."""


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment. One rendering at a time: it counts what that one spends.

    Blanks are as transformers has them (`trim_blocks`, `lstrip_blocks`), for templates are
    published for that.
    """

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        self._left = BUDGET
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _Generation],
            optimized=False,  # or constants would be worked out when a template is read
            finalize=self._paid,
        )
        self.globals = {name: self.globals[name] for name in _GLOBALS}
        self.globals["raise_exception"] = _raise_exception
        self.filters = {name: self._priced(FILTERS[name]) for name in _FILTERS}
        self.filters |= {"tojson": self._to_json, "join": self._join, "replace": self._replace}
        self.filters |= {"sum": self._sum}
        self.filters |= {
            _CONCAT: self._join,
            _COUNTED: self._rounds,
            _PAID: self._paid,
            _CUT: self._cut,
        }
        tests: dict[str, Any] = self.tests
        self.tests = tests | {name: self._compared(tests[name]) for name in _PRICED_TESTS}

    def begin(self) -> None:
        """A rendering begins, with a whole budget."""
        self._left = BUDGET

    def spend(self, price: int) -> None:
        """Takes from the budget.

        Raises:
            TooMuchWork: there is not so much left.
        """
        self._left -= price
        if self._left < 0:
            raise TooMuchWork("the template asks for more work than any conversation needs")

    # What Jinja asks of a sandbox ----------------------------------------------------------------

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Text has only some of its methods: others, such as `format`, may make anything large."""
        if isinstance(obj, str) and attribute not in _TEXT_METHODS:
            return self.unsafe_undefined(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """As `getattr`, where the name is an expression."""
        if isinstance(obj, str) and isinstance(argument, str):
            return self.getattr(obj, argument)
        return super().getitem(obj, argument)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Numbers have none."""
        return not isinstance(obj, int | float | bytes) and super().is_safe_attribute(
            obj, attr, value
        )

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The operators that can make something large."""
        return self._operate(operator, left, right)

    def _operate(self, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or (operator == "%" and isinstance(left, str)):
            raise SecurityError(f"templates may not use {operator} here")
        if operator == "*":
            texts = [value for value in (left, right) if not isinstance(value, int | float)]
            if any(not isinstance(value, str) for value in texts):
                raise SecurityError("templates may multiply numbers and text only")
            if texts:
                times = left if isinstance(right, str) else right
                self.spend(len(texts[0]) * max(int(times), 0))
        elif isinstance(left, str) and isinstance(right, str):
            self.spend(len(left) + len(right))
            return left + right
        found = self.binop_table[operator](left, right)
        if isinstance(found, int) and abs(found) >= _LARGEST_INTEGER:
            raise SecurityError("templates may not use numbers of more than 64 bits")
        return self._paid(found)

    def call(  # names as Jinja has them: they must not hide a keyword of the callable's
        __self,
        __context: Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Calls are paid for with the texts in them, and two methods of text priced first."""
        method, owner = getattr(__obj, "__name__", ""), getattr(__obj, "__self__", None)
        __self.spend(_ROUND + sum(len(text) for text in (owner, *args) if isinstance(text, str)))
        if isinstance(owner, str) and method == "join" and not kwargs:
            return __self._join(args[0], owner) if len(args) == 1 else owner.join(*args)
        if isinstance(owner, str) and method == "replace" and not kwargs:
            return __self._replace(owner, *args)
        return __self._paid(super().call(__context, __obj, *args, **kwargs))

    # Paying --------------------------------------------------------------------------------------

    def _paid(self, value: Any) -> Any:
        """The value, once it is paid for; of an iterator each item when it comes."""
        if isinstance(value, Iterator):
            return self._items(value, _ITEM)
        self.spend(_size(value, self._left))
        return value

    def _rounds(self, values: Iterable[Any]) -> Iterator[Any]:
        return self._items(values, _ROUND)

    def _items(self, values: Iterable[Any], price: int) -> Iterator[Any]:
        for value in values:
            self.spend(price)
            yield value

    def _cut(self, value: Any) -> Any:
        self.spend(len(value) if isinstance(value, Sized) else 0)
        return value

    def _priced(self, function: Callable[..., Any]) -> Callable[..., Any]:
        bounded = _BOUNDED.get(function.__name__, _unbounded)

        @functools.wraps(function)
        def priced(*args: Any, **kwargs: Any) -> Any:
            sizes = (len(value) for value in args if isinstance(value, str | list | tuple | range))
            self.spend(_ROUND + sum(sizes) + bounded(*args, **kwargs))
            return self._paid(function(*args, **kwargs))

        return priced

    def _compared(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def priced(*args: Any, **kwargs: Any) -> Any:
            return function(*map(self._paid, args), **kwargs)

        return priced

    def _sum(self, values: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
        total = start
        for value in values if attribute is None else map(make_attrgetter(self, attribute), values):
            self.spend(_ITEM)
            total = self._operate("+", total, value)
        return total

    def _join(self, values: Iterable[Any], separator: Any = "", attribute: str = "") -> str:
        if attribute:
            values = (self.getattr(value, attribute) for value in values)
        pieces, between = [], str(separator)
        for value in values:
            self.spend(_size(value, self._left) + len(between))
            pieces.append(str(value))
        return between.join(pieces)

    def _replace(self, text: Any, old: Any, new: Any, count: int | None = None) -> str:
        whole, gone, instead = str(self._paid(text)), str(old), str(new)
        most = len(whole) + 1 if count is None or count < 0 else count
        times = min(whole.count(gone), most)
        self.spend(_ROUND + len(whole) + times * len(instead))
        return whole.replace(gone, instead, most)

    def _to_json(self, value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
        size = _size(value, self._left)
        self.spend(size * (1 + min(max(indent or 0, 0), 16)))
        if indent is not None and indent > 16:
            raise SecurityError("tojson indents by 16 at most")
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _size(value: Any, most: int) -> int:
    """Price of a value, with that of all values in it; stops above `most`."""
    total, waiting = 0, [value]
    while waiting and total <= most:
        found = waiting.pop()
        total += _ITEM
        if isinstance(found, str | bytes):
            total += len(found)
        elif isinstance(found, dict):
            waiting += [*found.keys(), *found.values()]
        elif isinstance(found, list | tuple | set | frozenset):
            waiting += found
    return total


# What the arguments of some filters, other than texts and lists, ask for -------------------------


def _unbounded(*_: Any, **__: Any) -> int:
    return 0


def _price_of_batch(value: Any, linecount: int, fill_with: Any = None) -> int:
    return _ITEM * max(int(linecount), 0)


def _price_of_round(value: Any, precision: int = 0, method: str = "common") -> int:
    if abs(precision) > _MOST_DIGITS:
        raise SecurityError(f"templates may round to {_MOST_DIGITS} digits at most")
    return 0


def _price_of_int(value: Any, default: Any = 0, base: int = 10) -> int:
    if isinstance(value, str) and len(value) > _LONGEST_NUMBER:
        raise SecurityError(f"templates may read numbers of {_LONGEST_NUMBER} characters at most")
    return 0


_BOUNDED: dict[str, Callable[..., int]] = {
    "do_batch": _price_of_batch,
    "do_round": _price_of_round,
    "do_int": _price_of_int,
}
"""Prices by the names of Jinja's functions."""


def _raise_exception(message: object = "") -> None:
    raise TemplateRuntimeError(str(message)[:1_000])


class _Generation(Extension):
    """`{% generation %}`: what the model writes, as transformers names it."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """See `Extension.parse`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)

        def mark(character: str) -> nodes.Node:
            return nodes.Output([nodes.TemplateData(character)], lineno=line)

        return [mark(GENERATION_BEGINS), nodes.Scope(body, lineno=line), mark(GENERATION_ENDS)]


# Making templates payable ------------------------------------------------------------------------


def rewritten(tree: nodes.Template, text: Callable[[str], str]) -> nodes.Template:
    """A parsed template in which loops and literals are paid for.

    Args:
        tree: the template; it is changed.
        text: what becomes of each stretch of text that the template itself holds.

    Raises:
        TemplateSyntaxError: a loop calls itself, or another template is asked for.
    """
    for kind in (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends):
        if (found := tree.find(kind)) is not None:
            raise TemplateSyntaxError("a template may not read another", found.lineno)
    _rewrite(tree, text)
    return tree


def _rewrite(node: nodes.Node, text: Callable[[str], str]) -> nodes.Node:
    for name, value in list(node.iter_fields()):
        if isinstance(value, nodes.Node):
            setattr(node, name, _rewrite(value, text))
        elif isinstance(value, list):
            items = [
                _rewrite(item, text) if isinstance(item, nodes.Node) else item for item in value
            ]
            setattr(node, name, items)
    if isinstance(node, nodes.TemplateData):
        node.data = text(node.data)
    elif isinstance(node, nodes.Const) and isinstance(node.value, str):
        node.value = text(node.value)
    elif isinstance(node, nodes.For):
        if node.recursive:
            raise TemplateSyntaxError("a loop may not call itself", node.lineno)
        node.iter = _filtered(node.iter, _COUNTED)
    elif isinstance(node, nodes.Concat):
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), _CONCAT)
    elif isinstance(node, nodes.Compare):
        node.expr = _compared(node.expr)
        for operand in node.ops:
            operand.expr = _compared(operand.expr)
    elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _filtered(node, _CUT)
    elif isinstance(node, nodes.List | nodes.Dict) or (
        isinstance(node, nodes.Tuple) and node.ctx == "load"
    ):
        return _filtered(node, _PAID)
    return node


def _compared(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _filtered(node, _PAID)


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    assert isinstance(node, nodes.Expr)
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
