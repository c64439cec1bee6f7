"""Stands in for the example's model where a snippet of the documentation needs one: no torch."""

from __future__ import annotations

from service_streamer import ManagedModel


class TextInfillingModel:
    def predict(self, batch: list[str]) -> list[str]:
        return ["you" for _ in batch]


class ManagedBertModel(ManagedModel):
    def init_model(self) -> None:
        self.model = TextInfillingModel()

    def predict(self, batch: list[str]) -> list[str]:
        return self.model.predict(batch)
