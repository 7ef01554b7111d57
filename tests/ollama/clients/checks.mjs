// Runs the checks of one client, in their order, against the server given as the first argument.

export const url = process.argv[2];
export const hi = [{ role: 'user', content: 'hi' }];
export const say = (text) => [{ role: 'user', content: text }];
export const weather = {
  name: 'get_weather',
  description: 'the weather',
  parameters: { type: 'object', required: ['city'], properties: { city: { type: 'string' } } },
};

export async function check(name, run) {
  try {
    await run();
    console.log(`ok ${name}`);
  } catch (error) {
    process.exitCode = 1;
    console.log(`FAILED ${name}\n${error?.stack ?? error}`);
  }
}

export async function rejects(run) {
  try {
    await run();
  } catch (error) {
    return error;
  }
  throw new Error('nothing was thrown');
}
