"""Mixture-of-experts layers: routers, token dispatch, grouped experts."""
