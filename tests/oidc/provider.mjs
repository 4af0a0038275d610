// A real OpenID Connect issuer on loopback: node provider.mjs MODULE PORT KID
// MODULE is oauth2-mock-server's entry. PORT serves discovery and keys. PORT + 1 steers it: /rotate?kid=…&alg=… makes a
// new current key; /token?sub=…&aud=… answers a token signed with it, or with the one that &kid=… names.
import http from "node:http";
import { pathToFileURL } from "node:url";

const [module, port, kid] = process.argv.slice(2);
const { OAuth2Server } = await import(pathToFileURL(module).href);
const provider = new OAuth2Server();
let current = kid;

async function steer({ pathname, searchParams }) {
  const { kid = current, alg = "RS256", ttl = "300", ...claims } = Object.fromEntries(searchParams);
  if (pathname === "/rotate") {
    current = kid;
    await provider.issuer.keys.generate(alg, { kid });
    return kid;
  }
  const scopesOrTransform = (_header, payload) => Object.assign(payload, claims);
  return provider.issuer.buildToken({ kid, expiresIn: Number(ttl), scopesOrTransform });
}

await provider.issuer.keys.generate("RS256", { kid });
await provider.start(Number(port), "127.0.0.1");
http
  .createServer(async (request, response) => response.end(await steer(new URL(request.url, "http://localhost"))))
  .listen(Number(port) + 1, "127.0.0.1");
console.log(provider.issuer.url);
