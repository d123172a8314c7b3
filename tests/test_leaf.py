"""Torch's own modules are read off their instances and built again; what does not come out equal is
no leaf."""

import pytest
import torch
from torch import nn

from ppc.frontend.capture.leaf import constructor, describe

pytestmark = pytest.mark.torch

written = """
AdaptiveAvgPool1d(3) AdaptiveAvgPool2d((3,None)) AdaptiveAvgPool2d(1) AdaptiveMaxPool2d(2,return_indices=True)
AlphaDropout(0.2) AvgPool1d(2) AvgPool2d(3,2,1,count_include_pad=False) AvgPool3d((2,1,2),2)
BatchNorm1d(4) BatchNorm2d(4,eps=1e-3,momentum=None) BatchNorm3d(4,affine=False,track_running_stats=False)
Bilinear(2,3,4,bias=False) CELU(0.5) ChannelShuffle(2) CircularPad2d(1) ConstantPad1d(2,3.5)
ConstantPad2d((1,2,3,4),0.5) Conv1d(3,4,2) Conv2d(4,8,3,stride=2,padding=1,groups=2,bias=False)
Conv2d(4,8,(3,5),padding='same',padding_mode='circular') Conv3d(1,2,(1,2,3),dilation=(1,1,2))
ConvTranspose1d(2,3,4,stride=2,output_padding=1) ConvTranspose2d(2,3,4,bias=False) ConvTranspose3d(2,3,2)
CosineSimilarity(dim=2,eps=1e-5) Dropout(0.3) Dropout1d(0.3) Dropout2d(0.3) Dropout3d(0.3) ELU(0.7)
Embedding(9,4) Embedding(9,4,padding_idx=2) Embedding(9,4,max_norm=1.5,norm_type=1.0,scale_grad_by_freq=True)
EmbeddingBag(9,4) EmbeddingBag(9,4,mode='sum',padding_idx=1,include_last_offset=True) FeatureAlphaDropout(0.1)
Flatten() Flatten(2,3) Fold((4,5),(2,2)) GELU() GELU(approximate='tanh') GLU(1) GRU(3,4,2,dropout=0.1)
GRUCell(3,4,bias=False) GroupNorm(2,4) GroupNorm(2,4,affine=False) GroupNorm(2,4,eps=1e-3,bias=False) Hardshrink(0.4)
Hardsigmoid() Hardswish() Identity() InstanceNorm1d(4) InstanceNorm2d(4,affine=True) InstanceNorm3d(4,track_running_stats=True)
LPPool1d(2,3) LPPool2d(1.5,2,stride=1) LSTM(3,4,num_layers=2,batch_first=True,bidirectional=True) LSTM(3,4,proj_size=2)
LSTMCell(3,4) LayerNorm(4) LayerNorm((4,5),eps=1e-3,elementwise_affine=False) LayerNorm(4,bias=False) LeakyReLU(0.2)
Linear(3,4) Linear(3,4,bias=False) LocalResponseNorm(3,alpha=1e-3) LogSigmoid() LogSoftmax(dim=1) MaxPool1d(2)
MaxPool2d(3,stride=2,padding=1,ceil_mode=True) MaxPool3d((1,2,2)) MaxUnpool2d(2,stride=2) Mish()
MultiheadAttention(8,2) MultiheadAttention(8,2,dropout=0.1,bias=False,batch_first=True,kdim=3,vdim=4)
MultiheadAttention(8,2,add_bias_kv=True,add_zero_attn=True) PReLU() PReLU(4,init=0.1) PairwiseDistance(keepdim=True)
PixelShuffle(2) PixelUnshuffle(2) RMSNorm(4) RMSNorm((4,5),eps=1e-3,elementwise_affine=False)
RNN(3,4,nonlinearity='relu',bias=False) RNNCell(3,4,nonlinearity='relu') RReLU(0.1,0.2) ReLU() ReLU(inplace=True) ReLU6()
ReflectionPad1d(1) ReflectionPad2d((1,2,1,2)) ReplicationPad2d(2) SELU() SiLU() Sigmoid() Softmax(-1) Softmax2d()
Softmin(0) Softplus(2,10) Softshrink(0.3) Softsign() Tanh() Tanhshrink() Threshold(0.1,5) Unflatten(1,(2,3)) Unfold((2,3),stride=2)
Upsample(scale_factor=2) Upsample((4,5),mode='bilinear',align_corners=True) UpsamplingNearest2d(scale_factor=2) ZeroPad2d(1)
BCELoss() BCEWithLogitsLoss(reduction='sum') CrossEntropyLoss(label_smoothing=0.1,ignore_index=5) GaussianNLLLoss(full=True)
Hardtanh(-2,2) HuberLoss(delta=0.5) KLDivLoss(log_target=True) L1Loss() MSELoss() NLLLoss() SmoothL1Loss(beta=0.4) TripletMarginLoss(margin=0.4)
Linear(3,4,dtype=torch.float64) Conv2d(1,2,3,dtype=torch.bfloat16)
"""  # noqa: E501  # one a line would be 120 lines
modules = [part for line in written.strip().splitlines() for part in line.split(" ")]


def spell(made):
    parts = [*map(str_of, made.args), *(f"{name}={str_of(value)}" for name, value in made.kwargs)]
    return f"{made.cls}({', '.join(parts)})"


def str_of(value):
    return f"torch.{value.name}" if hasattr(value, "name") else repr(value)


@pytest.mark.parametrize("text", modules)
def test_rebuilt(text):
    module = eval(f"nn.{text}")  # noqa: S307  # our own text
    made = constructor(module)
    assert made is not None
    assert describe(eval(spell(made))) == describe(module)  # noqa: S307


@pytest.mark.parametrize(("text", "spelled"), [
    ("Linear(128, 384, bias=False)", "nn.Linear(128, 384, bias=False)"),
    ("Linear(128, 384, True)", "nn.Linear(128, 384)"),
    ("Conv2d(3, 4, (3, 3), (1, 1), padding=(1, 1))", "nn.Conv2d(3, 4, 3, padding=1)"),
    ("Conv2d(3, 4, (3, 5))", "nn.Conv2d(3, 4, (3, 5))"),
    ("Dropout(0.5, inplace=True)", "nn.Dropout()"),
    ("ReLU(inplace=True)", "nn.ReLU()"),  # after a send it would write what is on its way
    ("LSTM(3, 4, 2, bidirectional=True)", "nn.LSTM(3, 4, num_layers=2, bidirectional=True)"),
    ("LayerNorm((4,))", "nn.LayerNorm(4)"),
    ("Embedding(9, 4, padding_idx=-1)", "nn.Embedding(9, 4, padding_idx=8)"),
    ("BatchNorm2d(4, momentum=None)", "nn.BatchNorm2d(4, momentum=None)"),
])  # fmt: skip
def test_only_what_differs_from_the_defaults(text, spelled):
    module = eval(f"nn.{text}")  # noqa: S307
    assert spell(constructor(module)) == spelled


class Own(nn.Linear):
    pass


def hooked(kind):
    module = nn.Linear(3, 4)
    getattr(module, f"register_{kind}")(lambda *_: None)
    return module


def own_forward():
    module = nn.Linear(3, 4)
    module.forward = lambda x: x
    return module


def other_attribute():
    module = nn.Linear(3, 4)
    module.in_features = 5
    return module


def reshaped():
    module = nn.Linear(3, 4)
    module.weight = nn.Parameter(torch.ones(4, 2))
    return module


refused = {
    "an argument that it forgets": lambda: nn.PairwiseDistance(1.0),
    "a container": lambda: nn.Sequential(nn.Linear(3, 4)),
    "a list": lambda: nn.ModuleList([nn.Linear(3, 4)]),
    "a composite": lambda: nn.TransformerEncoderLayer(8, 2, 8),
    "a composite of default sizes": lambda: nn.Transformer(device="meta"),
    "a subclass": lambda: Own(3, 4),
    "a forward hook": lambda: hooked("forward_hook"),
    "a forward pre-hook": lambda: hooked("forward_pre_hook"),
    "a parametrization": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)),
    "a forward of its own": own_forward,
    "attributes that do not agree": other_attribute,
    "a weight of its own": lambda: nn.CrossEntropyLoss(weight=torch.ones(3)),
    "a function of its own": lambda: nn.TripletMarginWithDistanceLoss(distance_function=max),
    "sizes that its constructor does not give": reshaped,
}


@pytest.mark.parametrize("make", refused.values(), ids=refused)
def test_refused(make):
    assert constructor(make()) is None


def test_attributes_that_libraries_add_do_not_count():
    module = nn.Linear(3, 4)
    module._is_hf_initialized = True
    assert spell(constructor(module)) == "nn.Linear(3, 4)"


def test_a_further_parameter_counts():
    module = nn.Linear(3, 4)
    module.scale = nn.Parameter(torch.ones(1))
    assert constructor(module) is None


def test_the_default_dtype_counts():
    torch.set_default_dtype(torch.float64)
    try:
        module = nn.Linear(3, 4)
        assert spell(constructor(module)) == "nn.Linear(3, 4)"
    finally:
        torch.set_default_dtype(torch.float32)
    assert spell(constructor(module)) == "nn.Linear(3, 4, dtype=torch.float64)"


def test_no_values_are_made():
    assert constructor(nn.Linear(2**20, 2**20, device="meta")) is not None
