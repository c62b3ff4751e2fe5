"""Models as an `nn.Sequential` of units, each written once: whole, or cut over tp."""
