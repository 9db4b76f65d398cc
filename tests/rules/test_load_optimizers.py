"""Stock models, their state dicts, and optimizers in every arrangement: nothing above info."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tensorplay as tp
from tests.rules.test_false_alarms import MODELS
from tests.rules.test_load_false_alarms import alarms, make, of_state, optimizer_of, stepped, through_file


@pytest.mark.parametrize("name", MODELS)
def test_optimizers_of_every_arrangement(name):
    model, second = make(name), make(name)
    state_dict = through_file(model.state_dict())
    parameters = list(model.parameters())
    first = optimizer_of(model)
    stepped(model, first)
    others = optimizer_of(second)
    found = alarms(tp.validate_state_dict_load(model, state_dict, [first, others]))
    found += alarms(tp.validate_state_dict_load(model, state_dict, {"first": first, "others": others}))
    found += alarms(tp.validate_state_dict_load(model, state_dict, others))
    found += of_state(tp.check({"model": model, "first": first, "others": others}))
    found += of_state(tp.check({"model": model, "others": others}))

    swapped = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    swapped_schedule = torch.optim.lr_scheduler.CosineAnnealingLR(swapped, 10)
    stepped(model, swapped)
    swapped_schedule.step()
    found += alarms(tp.validate_state_dict_load(model, state_dict, [first, swapped]))
    halves = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.5}]
    groups = torch.optim.Adam([group for group in halves if group["params"]], lr=0.1)
    stepped(model, groups)
    found += alarms(tp.validate_state_dict_load(model, state_dict, groups))
    found += of_state(tp.check({"model": model, "groups": groups, "swapped": swapped, "schedule": swapped_schedule}))

    log_alpha = torch.zeros(1, requires_grad=True)
    beside = [torch.optim.Adam([log_alpha], lr=0.1), torch.optim.Adam([*parameters, log_alpha], lr=0.1)]
    found += alarms(tp.validate_state_dict_load(model, state_dict, [first, *beside]))
    found += alarms(tp.safe_load_state_dict(model, state_dict, optimizer=[first, *beside]))
    found += of_state(tp.check({"model": model, "first": first, "alpha": beside[0], "both": beside[1]}))

    assert found == []


def test_two_optimizers_of_which_one_has_a_model_that_is_not_handed_in():
    generator, discriminator = (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(2))
    optimizers = [torch.optim.Adam(one.parameters()) for one in (generator, discriminator)]
    for one, optimizer in zip((generator, discriminator), optimizers, strict=True):
        stepped(one, optimizer)
    state_dict = through_file(generator.state_dict())

    assert alarms(tp.validate_state_dict_load(generator, state_dict, optimizers)) == []
    assert alarms(tp.safe_load_state_dict(generator, state_dict, optimizer=optimizers)) == []
    assert of_state(tp.check({"generator": generator, "g": optimizers[0], "d": optimizers[1]})) == []
