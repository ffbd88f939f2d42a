"""Radix index of claims: contract and implementations."""
