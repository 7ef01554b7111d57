"""Every endpoint there is, from the dialects' modules."""

from slotpy.server.anthropic import messages
from slotpy.server.ollama import chat, embed, generate, models, system
from slotpy.server.openai import chat as openai_chat
from slotpy.server.openai import completions, embeddings, responses
from slotpy.server.openai import models as openai_models

ROUTES = [
    *system.ROUTES,
    *models.ROUTES,
    *generate.ROUTES,
    *chat.ROUTES,
    *embed.ROUTES,
    *openai_models.ROUTES,
    *openai_chat.ROUTES,
    *completions.ROUTES,
    *embeddings.ROUTES,
    *responses.ROUTES,
    *messages.ROUTES,
]
