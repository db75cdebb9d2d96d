"""The loss scale is read without waiting for the device."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import Tensor, nn

from recorded_streams import RecordedStreams
from stream_recorder import Recorder
from zcomm.ddp.loss_scale import LossScale


class Scaler:
    """A GradScaler: a number before its first use, then a tensor on the device."""

    def __init__(self) -> None:
        self.scale: Tensor | None = None

    def _get_scale_async(self) -> Tensor | None:
        return self.scale

    def get_scale(self) -> float:
        return 8.0 if self.scale is None else self.scale.item()


def test_loss_scale_is_that_of_the_last_forward() -> None:
    recorder, scaler, model = Recorder(), Scaler(), nn.Linear(2, 2)
    scale = LossScale(scaler, RecordedStreams(recorder), model)
    model(torch.ones(2))
    assert scale.value() == 8.0
    scaler.scale = torch.tensor(4.0)
    model(torch.ones(2))
    scaler.scale.fill_(2.0)  # by update(), after backward
    assert recorder.host_waits == []
    assert scale.value() == 4.0
    assert recorder.host_waits == ["synchronize"]
    assert scale.value() == 2.0  # no forward since, so it reads the scaler


def test_copy_of_a_model_leaves_the_scale_alone() -> None:
    recorder, model = Recorder(), nn.Linear(2, 2)
    scale = LossScale(Scaler(), RecordedStreams(recorder), model)
    copy.deepcopy(model)(torch.ones(2))
    assert scale._known is None
    pickle.loads(pickle.dumps(model))(torch.ones(2))
    assert scale._known is None
    model(torch.ones(2))
    assert scale._known == 8.0
