"""Types for formulas that are written once, for torch and for JAX.

Such a formula takes arrays of either kind. Its argument ``xp`` is the module with the functions for them: ``torch``, or the
namespace of JAX functions under torch's names that ``posteriors.nuts`` makes.
"""

from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

if TYPE_CHECKING:
    import jax

ArrayModule = ModuleType | SimpleNamespace
Array = TypeVar("Array", Tensor, "jax.Array")
Number = TypeVar("Number", Tensor, "jax.Array", float)
