"""The types of chapter 02: it has no autograd Function of its own. See lab/types.py."""

TOKENS = "dp",          # along which ranks have other tokens
RULES = {}
