"""Models for the items of ``service-streamer serve``: transformers pipelines, and your own.

An item is ``{"do": "predict", "inputs": ..., "parameters": {...}}``; other operations are
"generate", "embed" and "describe". Anything else is the input of a "predict" without parameters.
See ``PipelineModel``, and ``SteppedPipeline`` for texts that are generated step by step.

Importing this package loads neither torch nor transformers: the worker does, in ``init_model``.
"""

from .custom import CustomModel
from .model import PipelineModel
from .stepped_pipeline import SteppedPipeline
from .tasks import TASKS, parameter_schemas

__all__ = ["TASKS", "CustomModel", "PipelineModel", "SteppedPipeline", "parameter_schemas"]
