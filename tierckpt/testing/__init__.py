"""The public test kit: the contract every store keeps, and a store that fails on demand.

Needs pytest and pytest-asyncio. Nothing in tierckpt imports it.
"""
