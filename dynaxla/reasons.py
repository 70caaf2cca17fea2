import enum
from dataclasses import dataclass
class ReasonId(enum.Enum):
    NO_LOWERING="no_lowering"; UNSUPPORTED_CALL="unsupported_call"; UNSUPPORTED_DTYPE="unsupported_dtype"; DATA_DEPENDENT="data_dependent"; CUSTOM_OP="custom_op"
    LOWERING_FAILED="lowering_failed"; LOWERING_CRASHED="c"; LOWERING_TIMEOUT="t"; LOWERING_OUT_OF_MEMORY="m"; RANDOM="random"; HIGHER_ORDER="higher_order_op"
@dataclass(frozen=True)
class FallbackReason:
    id: ReasonId
    op: str
    dtypes: tuple = ()
    frame: str | None = None
    hint: str = ""
    detail: str = ""
    repro: str | None = None
def user_frame(node): return None
