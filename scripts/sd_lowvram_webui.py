"""The WebUI's door: hands on to webui_ext, which is found because this file's extension is on the path just now."""

from webui_ext import host_refusal, register

if refusal := host_refusal():
    print(refusal)
else:
    from webui_ext.script import LowVRAMScript

    __all__ = ["LowVRAMScript"]

    register()
