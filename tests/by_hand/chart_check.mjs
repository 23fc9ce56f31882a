// Validates Kubernetes objects, given as JSON lines on standard input, with the schemas of the
// packages kubernetes-models and @kubernetes-models/prometheus-operator. Prints a line for each
// object, and exits with 1 if an object is invalid.
//
// usage: node chart_check.mjs NODE_MODULES
import {readFileSync} from 'node:fs';
import {resolve} from 'node:path';

let wrong = 0;
for (const line of readFileSync(0, 'utf8').split('\n').filter(Boolean)) {
  const object = JSON.parse(line);
  const known = object.apiVersion.startsWith('monitoring.coreos.com/')
    ? '@kubernetes-models/prometheus-operator' : 'kubernetes-models';
  try {
    const models = await import(resolve(process.argv[2], known, object.apiVersion, 'index.js'));
    new models[object.kind](object).validate();
    console.log(`    ${object.kind} ${object.metadata.name}: valid`);
  } catch (error) {
    ++wrong;
    console.log(`    ${object.kind} ${object.metadata.name}: ${error.message}`);
  }
}
process.exit(wrong ? 1 : 0);
