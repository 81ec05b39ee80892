"""The methods by name. A new method is a file beside this one and an entry here."""

from surefoot.methods.base import Method
from surefoot.methods.grpo.method import Grpo
from surefoot.methods.sft import Sft

METHODS: dict[str, type[Method]] = {method.name: method for method in (Sft, Grpo)}
