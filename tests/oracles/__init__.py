"""Published losses that the package does not ship, each written from its formula, for the golden vectors only.

Plain torch on small float64 tensors, no care for memory or extreme input. Nothing here is imported by the package.
"""
