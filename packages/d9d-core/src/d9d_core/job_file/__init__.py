"""Job file: reading, names resolved to plugins, validation, schema.

Plugin authors derive their configs from :class:`d9d_core.config.PluginConfig`.
"""
