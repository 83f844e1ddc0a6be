// Calls endpoints of a running stack as any JavaScript program would, and prints what came as one line of JSON each.
//
//   node caller.js nats://host:port
import { connect, headers, RequestError } from "@nats-io/transport-node";

const connection = await connect({ servers: process.argv[2] });

function describe(message) {
  return {
    text: message.string(),
    bytes: Buffer.from(message.data).toString("hex"),
    type: message.headers?.get("Content-Type"),
    id: message.headers?.get("X-Request-ID"),
    error: message.headers?.get("Nats-Service-Error"),
    code: message.headers?.get("Nats-Service-Error-Code"),
  };
}

async function call(name, subject, body, given = {}) {
  const sent = headers();
  for (const [key, value] of Object.entries(given)) sent.set(key, value);
  try {
    const message = await connection.request(subject, body, { timeout: 20000, headers: sent });
    console.log(JSON.stringify({ name, ...describe(message) }));
  } catch (error) {
    const nobody = error instanceof RequestError && error.isNoResponders();
    console.log(JSON.stringify({ name, failed: nobody ? "no responders" : String(error) }));
  }
}

await call("json", "serve.call.default.echo", JSON.stringify({ numbers: [1, 2] }), { "X-Request-ID": "js-1" });
await call("bytes", "serve.call.echo", Uint8Array.from([0, 255, 13, 10, 0]), {
  "Content-Type": "application/octet-stream",
});
await call("raises", "serve.call.echo", "raise");
await call("unknown", "serve.call.nothing", "{}");
await call("late", "serve.call.echo", "hold", { "X-Serve-Relative-SLO-MS": "200" });
await call("nobody", "elsewhere.call.echo", "{}");
await call("large", "serve.call.echo", "big");

const wantsStream = headers();
wantsStream.set("X-Serve-Stream", "1");
let size = 0;
let messages = 0;
const many = { strategy: "sentinel", maxWait: 20000, headers: wantsStream };
for await (const message of await connection.requestMany("serve.call.echo", "big", many)) {
  size += message.data.length;
  messages += 1;
}
console.log(JSON.stringify({ name: "streamed", size, messages }));

await connection.drain();
