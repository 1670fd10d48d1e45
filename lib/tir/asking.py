"""What kernels ask the machine that they run on, once, and assert: the function in LLVM's language, and the check."""

import tvm
from tvm import tirx

_ONCE = """
@{name}_known = internal global i32 -1
define linkonce_odr i32 @{name}() noinline nounwind {{
  %known = load i32, ptr @{name}_known
  %asked = icmp sge i32 %known, 0
  br i1 %asked, label %done, label %ask
done:
  ret i32 %known
ask:
{asking}
  store i32 %found, ptr @{name}_known
  ret i32 %found
}}
"""


def once(name: str, asking: str) -> str:
    """A function that asks when it is first called; after that it is a load and a branch.

    Args:
        asking: Instructions, the first of them in the block `ask`, that leave 1 or 0 in `%found` (i32).
    """
    return _ONCE.format(name=name, asking=asking)


def required(name: str, told: str) -> tirx.Stmt:
    """Asserts that such a function says 1; else the caller gets a RuntimeError that tells this."""
    holds = tirx.EQ(tirx.call_extern("int32", name), tirx.const(1, "int32"))
    # TVM 0.27's constructor names these two the other way round.
    return tirx.AssertStmt(holds, tvm.ir.StringImm("RuntimeError"), [tvm.ir.StringImm(told)])
