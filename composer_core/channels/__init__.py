"""The channels that come with the core. Settings and rows are light; `sdpo` and `replay` import torch."""
