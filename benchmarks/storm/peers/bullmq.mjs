// The application that is caught in the storm, for BullMQ: `node bullmq.mjs work`, and `node bullmq.mjs send`, which
// sends what it reads, a JSON array [job, shard, bad] a line.  STORM_POLICY says how it retries.
import { createRequire } from "node:module";
import net from "node:net";
import readline from "node:readline";

const require = createRequire(process.env.STORM_NODE_MODULES + "/");
const { Queue, Worker } = require("bullmq");
const url = new URL(process.env.STORM_URL);
const connection = { host: url.hostname, port: Number(url.port), maxRetriesPerRequest: null };

const RETRIES = {
  bullmq: { attempts: 20, backoff: { type: "exponential", delay: 1000 } },
  "bullmq-jitter": { attempts: 20, backoff: { type: "exponential", delay: 1000, jitter: 0.5 } },
};

// One connection, answered out of order, cannot be told apart: each call has its own, and they are kept.
const idle = [];

function call([job, shard, bad]) {
  const socket = idle.pop() ?? net.connect(Number(process.env.STORM_PORT), "127.0.0.1").setNoDelay();
  return new Promise((resolve, reject) => {
    const fail = () => reject(new Error("the downstream is gone"));
    socket.once("error", fail);
    socket.once("data", (data) => {
      socket.removeListener("error", fail);
      idle.push(socket);
      const status = Number(data);
      status === 200 ? resolve() : reject(new Error(`status ${status}`));
    });
    socket.write(`${job} ${shard} ${bad}\n`);
  });
}

if (process.argv[2] === "work") {
  const worker = new Worker("storm", (job) => call(job.data), {
    connection,
    concurrency: Number(process.env.STORM_THREADS),
  });
  worker.on("error", (error) => {
    console.error(error);
    // Whoever started this is gone, and the server with it: it would be said for ever.
    if (error.code === "ECONNREFUSED") process.exit(1);
  });
  process.on("SIGTERM", () => {
    setTimeout(() => process.exit(1), 5000);
    worker.close().then(() => process.exit(0));
  });
  const parent = process.ppid;
  setInterval(() => process.ppid === parent || process.exit(1), 1000).unref();
} else {
  const queue = new Queue("storm", { connection });
  const options = { ...RETRIES[process.env.STORM_POLICY], removeOnComplete: true };
  for await (const line of readline.createInterface({ input: process.stdin })) {
    await queue.add("work", JSON.parse(line), options);
  }
  process.exit(0);
}
