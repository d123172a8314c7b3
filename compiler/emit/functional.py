"""Operations that people write as torch.nn.functional calls, with the signatures written by hand.

`F.conv2d(x, self.weight, padding=1)`: an entry says which of the schema's arguments come first, by
position, and what the others are called there. An argument that is not named here may only be left
out at its default.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Signature:
    """How F spells an operation."""

    name: str
    positional: tuple[str, ...]
    """The schema's names, in F's order."""
    keywords: Mapping[str, str]
    """The schema's name -> F's."""


def signature(name: str, positional: str, keywords: str = "") -> Signature:
    """`keywords` lists names, `schema=functional` where they differ."""
    pairs = (word.partition("=") for word in keywords.split())
    return Signature(name, tuple(positional.split()), {a: b or a for a, _, b in pairs})


conv = "stride padding dilation groups"
transposed = "stride padding output_padding groups dilation"
pool = "stride padding dilation ceil_mode"
average = "stride padding ceil_mode count_include_pad divisor_override"

signatures: Mapping[str, Signature] = {
    "linear": signature("linear", "input weight bias"),
    "bilinear": signature("bilinear", "input1 input2 weight bias"),
    "conv1d": signature("conv1d", "input weight bias", conv),
    "conv2d": signature("conv2d", "input weight bias", conv),
    "conv3d": signature("conv3d", "input weight bias", conv),
    "conv_transpose1d": signature("conv_transpose1d", "input weight bias", transposed),
    "conv_transpose2d": signature("conv_transpose2d", "input weight bias", transposed),
    "conv_transpose3d": signature("conv_transpose3d", "input weight bias", transposed),
    "embedding": signature("embedding", "indices weight", "padding_idx scale_grad_by_freq sparse"),
    "embedding_bag": signature(
        "embedding_bag", "indices weight offsets",
        "scale_grad_by_freq mode sparse per_sample_weights include_last_offset padding_idx",
    ),
    "layer_norm": signature("layer_norm", "input normalized_shape weight bias", "eps"),
    "rms_norm": signature("rms_norm", "input normalized_shape weight", "eps"),
    "group_norm": signature("group_norm", "input num_groups weight bias", "eps"),
    "batch_norm": signature("batch_norm", "input running_mean running_var weight bias", "training momentum eps"),
    "instance_norm": signature(
        "instance_norm", "input running_mean running_var weight bias", "use_input_stats momentum eps"
    ),
    "dropout": signature("dropout", "input p", "train=training"),
    "alpha_dropout": signature("alpha_dropout", "input p", "train=training"),
    "feature_dropout": signature("dropout2d", "input p", "train=training"),
    "relu": signature("relu", "self"),
    "relu6": signature("relu6", "self"),
    "gelu": signature("gelu", "self", "approximate"),
    "silu": signature("silu", "self"),
    "mish": signature("mish", "self"),
    "selu": signature("selu", "self"),
    "elu": signature("elu", "self", "alpha"),
    "leaky_relu": signature("leaky_relu", "self", "negative_slope"),
    "hardswish": signature("hardswish", "self"),
    "hardsigmoid": signature("hardsigmoid", "self"),
    "hardtanh": signature("hardtanh", "self", "min_val max_val"),
    "softplus": signature("softplus", "self", "beta threshold"),
    "log_sigmoid": signature("logsigmoid", "self"),
    "glu": signature("glu", "self", "dim"),
    "prelu": signature("prelu", "self weight"),
    "cross_entropy_loss": signature("cross_entropy", "self target weight", "ignore_index reduction label_smoothing"),
    "nll_loss_nd": signature("nll_loss", "self target weight", "ignore_index reduction"),
    "mse_loss": signature("mse_loss", "self target", "reduction"),
    "l1_loss": signature("l1_loss", "self target", "reduction"),
    "smooth_l1_loss": signature("smooth_l1_loss", "self target", "reduction beta"),
    "huber_loss": signature("huber_loss", "self target", "reduction delta"),
    "binary_cross_entropy": signature("binary_cross_entropy", "self target weight", "reduction"),
    "binary_cross_entropy_with_logits": signature(
        "binary_cross_entropy_with_logits", "self target weight", "pos_weight reduction"
    ),
    "kl_div": signature("kl_div", "self target", "reduction log_target"),
    "max_pool1d": signature("max_pool1d", "self kernel_size", pool),
    "max_pool2d": signature("max_pool2d", "self kernel_size", pool),
    "max_pool3d": signature("max_pool3d", "self kernel_size", pool),
    "avg_pool1d": signature("avg_pool1d", "self kernel_size", "stride padding ceil_mode count_include_pad"),
    "avg_pool2d": signature("avg_pool2d", "self kernel_size", average),
    "avg_pool3d": signature("avg_pool3d", "self kernel_size", average),
    "adaptive_avg_pool1d": signature("adaptive_avg_pool1d", "self output_size"),
    "adaptive_avg_pool2d": signature("adaptive_avg_pool2d", "self output_size"),
    "adaptive_avg_pool3d": signature("adaptive_avg_pool3d", "self output_size"),
    "pad": signature("pad", "self pad", "mode value"),
    "one_hot": signature("one_hot", "self num_classes"),
    "pixel_shuffle": signature("pixel_shuffle", "self upscale_factor"),
    "scaled_dot_product_attention": signature(
        "scaled_dot_product_attention", "query key value",
        "attn_mask dropout_p is_causal scale enable_gqa",
    ),
}  # fmt: skip

reductions = ("none", "mean", "sum")
"""The schema counts them; F names them."""
bag_modes = ("sum", "mean", "max")
