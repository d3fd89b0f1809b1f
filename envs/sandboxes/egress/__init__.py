"""Egress: what a cell may reach outside, and the proxy that lets it reach that and nothing else.

Off unless ``SandboxSpec.egress`` names targets. The proxy runs in the owner's process and answers on one port of the
cell's own loopback (see ``supervisor.network`` for how it comes there).
"""
