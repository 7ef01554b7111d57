"""What a request finds in its application, and under which key."""

from aiohttp import web

from slotpy.server.service import Service

SERVICE = web.AppKey("service", Service)
