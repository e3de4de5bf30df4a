"""Hosts that are reached directly: by ssh, or the machine that we are on."""
