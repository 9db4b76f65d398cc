"""Generic device tests in the form of PyTorch's own: instantiate_device_type_tests makes into tests of a device."""

# ruff: noqa: PT009 (PyTorch's assertEqual compares tensors)

from __future__ import annotations

import unittest
from types import ModuleType

import torch
from torch.testing._internal import common_device_type
from torch.testing._internal.common_device_type import (
    PrivateUse1TestBase,
    deviceCountAtLeast,
    dtypes,
    instantiate_device_type_tests,
)
from torch.testing._internal.common_utils import TestCase

NUMBERS = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.complex64, torch.bool)


class TestEmpty(TestCase):
    @dtypes(*NUMBERS)
    def test_factories(self, device, dtype):
        for x in (
            torch.empty(2, 3, device=device, dtype=dtype),
            torch.empty_strided((2, 3), (1, 2), device=device, dtype=dtype),
            torch.ones(2, 3, device=device, dtype=dtype).new_empty(4),
            torch.empty_like(torch.ones(2, 3, dtype=dtype), device=device),
        ):
            self.assertEqual((x.device, x.dtype), (torch.device(device), dtype))
        for make in (torch.zeros, torch.ones):
            self.assertEqual(make(2, 3, device=device, dtype=dtype).cpu(), make(2, 3, dtype=dtype))

    def test_memory_formats(self, device):
        x = torch.empty(2, 3, 4, 5, device=device, memory_format=torch.channels_last)
        self.assertTrue(x.is_contiguous(memory_format=torch.channels_last))
        self.assertTrue(torch.empty_like(x).is_contiguous(memory_format=torch.channels_last))

    def test_no_elements(self, device):
        self.assertEqual(torch.empty(0, 3, device=device).sum().item(), 0)


class TestCopy(TestCase):
    @dtypes(*NUMBERS)
    def test_round_trip(self, device, dtype):
        x = torch.testing.make_tensor(3, 4, device="cpu", dtype=dtype)
        self.assertEqual(x.to(device).cpu(), x)
        self.assertEqual(x.t().to(device).cpu(), x.t())
        self.assertEqual(x[:, ::2].to(device)[1:].cpu(), x[1:, ::2])

    @dtypes(torch.float64, torch.int32, torch.bool)
    def test_to_another_dtype(self, device, dtype):
        x = torch.tensor([0.0, 1.5, -2.0])
        self.assertEqual(torch.empty(3, device=device, dtype=dtype).copy_(x).cpu(), x.to(dtype))

    @deviceCountAtLeast(2)
    def test_between_devices(self, devices):
        x = torch.arange(6.0, device=devices[0])
        y = x.to(devices[1])
        self.assertEqual(y.device, torch.device(devices[1]))
        self.assertEqual(y.cpu(), x.cpu())


class TestView(TestCase):
    def test_views_share_memory(self, device):
        x = torch.arange(24.0, device=device)
        for view in (x.view(4, 6), x[3:9], x.view(4, 6).t(), x.unfold(0, 4, 2), x.expand(2, 24), x[None]):
            self.assertEqual(view.untyped_storage().data_ptr(), x.untyped_storage().data_ptr())
            self.assertTrue(view._is_view())

    def test_write_through_a_view(self, device):
        x = torch.zeros(3, 4, device=device)
        x.t()[1].add_(1)
        self.assertEqual(x[:, 1].sum().item(), 3)
        self.assertEqual(x._version, 1)


class TestBackward(TestCase):
    @dtypes(torch.float32, torch.float64)
    def test_gradients(self, device, dtype):
        def function(x, w):
            return torch.nn.functional.gelu(x @ w).softmax(-1)[:, ::2].exp().sum()

        x, w = torch.randn(3, 4, dtype=dtype), torch.randn(4, 5, dtype=dtype)
        here = [t.clone().requires_grad_() for t in (x, w)]
        there = [t.to(device).requires_grad_() for t in (x, w)]
        function(*here).backward()
        function(*there).backward()
        for a, b in zip(here, there, strict=True):
            self.assertEqual(b.grad.device, torch.device(device))
            self.assertEqual(b.grad.cpu(), a.grad)

    def test_gradcheck(self, device):
        x = torch.randn(3, 3, dtype=torch.float64, device=device, requires_grad=True)
        self.assertTrue(torch.autograd.gradcheck(lambda x: (x.t() * x[0]).cumsum(0), x))


def instantiated() -> unittest.TestSuite:
    """Answer the tests above as tests of the renamed backend, which must be loaded."""
    bases = common_device_type.device_type_test_bases
    if PrivateUse1TestBase not in bases:  # PyTorch's module was imported before the backend was there
        bases.append(PrivateUse1TestBase)
    scope = {"__name__": __name__}
    for generic in (TestEmpty, TestCopy, TestView, TestBackward):
        scope[generic.__name__] = generic
        instantiate_device_type_tests(generic, scope, only_for="privateuse1")
    made = ModuleType("instantiated")
    made.__dict__.update(scope)
    return unittest.defaultTestLoader.loadTestsFromModule(made)
