#include "serve/routes.h"

#include <arpa/inet.h>
#include <unistd.h>

#include <algorithm>
#include <random>
#include <sstream>

#include "runtime/files/files.h"
#include "runtime/text.h"

// The page, as the assembler finds it.
__asm__(
    ".section .rodata\n"
    ".global train_gpt_page, train_gpt_page_end\n"
    "train_gpt_page:\n"
    ".incbin \"serve/page.html\"\n"
    "train_gpt_page_end:\n"
    ".previous\n");
extern const char train_gpt_page[], train_gpt_page_end[];

namespace {

// Without this the page could be made to show what other sites send.
constexpr const char* PAGE_POLICY =
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'";

// In a time that does not depend on where they differ.
bool same_key(const std::string& given, const std::string& key) {
    unsigned different = given.size() != key.size();
    for (size_t i = 0; i < given.size(); i++)
        different |= unsigned(static_cast<unsigned char>(given[i]) ^ static_cast<unsigned char>(key[i % key.size()]));
    return different == 0;
}

// "localhost:8080" and "[::1]:8080" without their ports.
std::string without_port(const std::string& host) {
    if (!host.empty() && host[0] == '[') return host.substr(1, host.find(']') - 1);
    return host.substr(0, host.find(':'));
}

bool is_address(const std::string& host) {
    in6_addr address;
    return inet_pton(AF_INET, host.c_str(), &address) == 1 || inet_pton(AF_INET6, host.c_str(), &address) == 1;
}

std::string own_name() {
    char name[256] = "";
    gethostname(name, sizeof name - 1);
    return name;
}

uint64_t random_seed() {
    thread_local std::random_device source;
    return uint64_t(source()) << 32 | source();
}

// The methods of the paths that are answered.
const char* method_of(const std::string& path) {
    for (const char* get : {"/", "/health", "/metrics", "/v1/models"})
        if (path == get) return "GET";
    for (const char* post : {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"})
        if (path == post) return "POST";
    return nullptr;
}

}  // namespace

std::vector<std::string> read_keys(const std::string& path) {
    std::vector<std::string> keys;
    std::istringstream lines(read_file(path));
    for (std::string line; std::getline(lines, line);) {
        line.erase(std::find_if(line.rbegin(), line.rend(), [](char c) { return c != ' ' && c != '\r'; }).base(),
                   line.end());
        if (!line.empty()) keys.push_back(line);
    }
    require(!keys.empty(), "--api-key-file ", path, ": has no key; write one a line");
    return keys;
}

std::string too_large_body() {
    return ApiError(http::TOO_LARGE, "the body of the request is too large").body();
}

Routes::Routes(Service& s, Access a) : service(s), access(std::move(a)) {}

// A page of another site could have its name resolve to this machine (DNS rebinding); it would send that name.
void Routes::check_host(const http::Request& request) const {
    const std::string host = without_port(request.header("host"));
    if (host == "localhost" || host == access.host || is_address(host) || host == own_name()) return;
    if (!access.keys.empty()) return;  // such a page has no key
    throw ApiError(http::FORBIDDEN,
                   str("Host '", host, "' is not this server's name; use its address, or --api-key-file"));
}

void Routes::check_origin(const http::Request& request, http::Reply& reply) const {
    const std::string origin = request.header("origin");
    if (origin.empty() || origin == "http://" + request.header("host")) return;
    const auto& all = access.origins;
    if (std::find(all.begin(), all.end(), origin) == all.end() && std::find(all.begin(), all.end(), "*") == all.end())
        throw ApiError(http::FORBIDDEN, str("Origin '", origin, "' may not ask; allow it with --cors-origin"));
    reply.set_header("Access-Control-Allow-Origin", origin);
    reply.set_header("Vary", "Origin");
    if (request.method != "OPTIONS") return;
    reply.set_header("Access-Control-Allow-Methods", "GET, POST");
    reply.set_header("Access-Control-Allow-Headers", "Authorization, Content-Type");
    reply.set_header("Access-Control-Max-Age", "600");
}

// The number of the request's key, from 1; 0 where no key is needed.
int64_t Routes::key_of(const http::Request& request) const {
    if (access.keys.empty()) return 0;
    const std::string given = request.header("authorization"), scheme = "Bearer ";
    int64_t found = 0;
    for (size_t i = 0; i < access.keys.size(); i++)
        if (starts_with(given, scheme) && same_key(given.substr(scheme.size()), access.keys[i])) found = int64_t(i) + 1;
    if (!found)
        throw ApiError(http::UNAUTHORISED, "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'");
    return found;
}

void Routes::complete(const http::Request& request, const std::shared_ptr<http::Reply>& reply, bool chat, int64_t key) {
    CompletionCall call = (chat ? parse_chat : parse_completion)(
        request.body, service.model, service.model.fixed_seed ? service.model.defaults.seed : random_seed());
    const auto answer = std::make_shared<Answer>(std::move(call), service.model, reply, key);
    const std::weak_ptr<Answer> weak = answer;
    service.submit(answer, request.path);
    reply->on_gone([this, weak] {
        if (const std::shared_ptr<Answer> left = weak.lock()) left->gone = true;
        service.wake();
    });
}

void Routes::answer(const http::Request& request, const std::shared_ptr<http::Reply>& reply) {
    const bool known = method_of(request.path);
    const std::string path = known ? request.path : "other";
    try {
        check_host(request);
        check_origin(request, *reply);
        if (request.method == "OPTIONS") return reply->send(http::NO_CONTENT, "text/plain", "");
        if (!known) throw ApiError(http::NOT_FOUND, str("there is no ", request.path.substr(0, 100), " here"));
        const std::string expected = method_of(request.path);
        if (request.method != expected && !(expected == "GET" && request.method == "HEAD")) {
            reply->set_header("Allow", expected);
            throw ApiError(http::WRONG_METHOD, str(request.path, " is for ", expected));
        }
        const bool chat = path == "/v1/chat/completions";
        if (chat || path == "/v1/completions") return complete(request, reply, chat, key_of(request));
        const std::string body = answer_to(request, reply);
        service.metrics.request(path, http::OK);
        if (!body.empty()) reply->send(http::OK, "application/json", body);
    } catch (const ApiError& e) {
        service.metrics.request(path, e.status);
        if (e.status == http::UNAVAILABLE) reply->set_header("Retry-After", "1");
        if (e.status == http::UNAUTHORISED) reply->set_header("WWW-Authenticate", "Bearer");
        reply->send(e.status, "application/json", e.body());
    } catch (const std::exception& e) {
        service.metrics.request(path, http::FAILED);
        reply->send(http::FAILED, "application/json", ApiError(http::FAILED, e.what()).body());
    }
}

// The body as JSON; "" where the reply is given otherwise.
std::string Routes::answer_to(const http::Request& request, const std::shared_ptr<http::Reply>& reply) {
    const std::string& path = request.path;
    if (path == "/") {
        reply->set_header("Content-Security-Policy", PAGE_POLICY);
        reply->set_header("X-Content-Type-Options", "nosniff");
        reply->send(http::OK, "text/html; charset=utf-8", {train_gpt_page, train_gpt_page_end});
        return "";
    }
    if (path == "/health") return "{\"status\":\"ok\"}\n";
    key_of(request);
    if (path == "/metrics") {
        reply->send(http::OK, "text/plain; version=0.0.4; charset=utf-8", service.metrics.text());
        return "";
    }
    if (path == "/v1/models") return list_models(service.model);
    if (path == "/tokenize") return tokenize(request.body, service.model);
    return detokenize(request.body, service.model);
}
