"""torch, where it is installed, and small modules of it."""

import pytest


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def models(torch):
    """Small modules, made where torch is there."""
    nn = torch.nn

    class Block(nn.Module):
        """A residual block with a batch norm and a classifier."""

        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
            self.head = nn.Linear(8, 4)
            for values in (self.norm.running_mean, self.norm.running_var, self.norm.weight):
                nn.init.uniform_(values, 0.5, 1.5)

        def forward(self, image):
            features = torch.relu(self.norm(self.conv(image)) + image)
            return {"features": features, "logits": self.head(features.mean((2, 3)))}

    class Function(nn.Module):
        """Any function of tensors."""

        def __init__(self, function, **modules):
            super().__init__()
            self.function = function
            for name, module in modules.items():
                self.add_module(name, module)

        def forward(self, *inputs):
            return self.function(self, *inputs)

    torch.manual_seed(0)
    return {"block": Block().eval(), "function": Function}
