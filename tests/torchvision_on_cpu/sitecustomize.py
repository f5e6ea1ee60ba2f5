"""For vLLM's process in a test: lets torchvision, built for CUDA, be imported beside torch's CPU build.

vLLM imports it with Qwen3.5's image processor, which a text model never calls; it asks for these operators as it is
imported, and its library, which has them, does not load here.
"""

import torch

OPERATORS = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms", "roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d", "_roi_align_backward",
             "_roi_pool_backward", "_ps_roi_align_backward", "_ps_roi_pool_backward", "_deform_conv2d_backward"):
    OPERATORS.define(f"{name}(Tensor x) -> Tensor")
