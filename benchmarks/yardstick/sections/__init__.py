"""What is measured, in the order of the page."""

from __future__ import annotations

from yardstick.plan import Section
from yardstick.sections.costs import SECTIONS as COSTS
from yardstick.sections.faults import SECTIONS as FAULTS
from yardstick.sections.libraries import SECTIONS as LIBRARIES
from yardstick.sections.models import SECTIONS as MODELS
from yardstick.sections.original_tables import SECTIONS as ORIGINAL_TABLES
from yardstick.sections.pipelines import SECTIONS as PIPELINES
from yardstick.sections.ray import SECTIONS as RAY
from yardstick.sections.servers import SECTIONS as SERVERS
from yardstick.sections.shared import SECTIONS as SHARED
from yardstick.sections.stages import SECTIONS as STAGES
from yardstick.sections.streams import SECTIONS as STREAMS

__all__ = ["SECTIONS"]

SECTIONS: tuple[Section, ...] = (
    *LIBRARIES,
    *STAGES,
    *SERVERS,
    *FAULTS,
    *MODELS,
    *ORIGINAL_TABLES,
    *COSTS,
    *PIPELINES,
    *STREAMS,
    *SHARED,
    *RAY,
)
