// @langchain/ollama of npm.

import assert from 'node:assert/strict';
import { ChatOllama, OllamaEmbeddings } from '@langchain/ollama';
import { check, url, weather } from './checks.mjs';

await check('chats and streams', async () => {
  const chat = new ChatOllama({ model: 'tinychat', baseUrl: url });
  assert.equal((await chat.invoke('hi')).content, 'Hello!');
  let text = '';
  for await (const part of await chat.stream('hi')) text += part.content;
  assert.equal(text, 'Hello!');
});

await check('calls tools', async () => {
  const chat = new ChatOllama({ model: 'tinythink', baseUrl: url });
  const reply = await chat.bindTools([{ type: 'function', function: weather }]).invoke('TOOL');
  assert.deepEqual(reply.tool_calls[0].args, { city: 'Paris' });
});

await check('embeds', async () => {
  const vectors = await new OllamaEmbeddings({ model: 'tinychat', baseUrl: url }).embedDocuments(['a']);
  assert(vectors[0].length > 1);
});
