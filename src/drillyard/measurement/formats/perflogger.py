"""The PerfLogger's step lines, which Drillyard's own console prints too.

    [PerfLogger] Using 70.55B parameters for TFLOPs calculation.
    Step: 5 | Time: 14.54s | TFLOPs/s/GPU: 954.0 | Tokens/s/GPU: 2254 | Loss: 0.6620

Each line is one optimizer step; `Time` is its duration.
"""

from __future__ import annotations

import re
from typing import Final

from drillyard.measurement.formats.line_rules import LineRule, RuleContext
from drillyard.measurement.formats.log_format import ENDS, NUMBER, StepPattern, TextFormat
from drillyard.measurement.formats.values import Value, decode_values

_PATTERN: Final = (
    rb"Step: *(\d{1,18}) *\| *Time: *%s ?s *\| *TFLOPs/s/GPU: *%s *\| *Tokens/s/GPU: *%s *\| *Loss: *%s"
    % (rb"([-+.0-9eE]{1,64}|[-+]?nan|[-+]?inf)", NUMBER, NUMBER, NUMBER)
) + ENDS
_LINE: Final = re.compile(_PATTERN)
_VALUES: Final = (
    Value("step", integer=True),
    Value("seconds"),
    Value("printed_tflops_per_gpu"),
    Value("printed_tokens_per_second_per_gpu"),
    Value("loss"),
)


class PerfLogger(TextFormat):
    """See the module."""

    name = "perflogger"
    title = "PerfLogger"
    preference = 70
    anchor = b"TFLOPs/s/GPU: "

    def step_pattern(self, line: bytes) -> StepPattern | None:
        """See TextFormat."""
        match = _LINE.search(line)
        return None if match is None else StepPattern(match.start(), _PATTERN, decode_values(_VALUES, {}))

    def rules(self) -> tuple[LineRule, ...]:
        """See TextFormat."""
        return (
            LineRule(
                b"[PerfLogger] Using ",
                rb"Using (?P<parameters>[\d.]+[KMBT]?) parameters",
                RuleContext.learn_groups,
                once=True,
            ),
            LineRule(b"Starting FSDP training", rb"Starting FSDP training", RuleContext.begin_round),
        )
